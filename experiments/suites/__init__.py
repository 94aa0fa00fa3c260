"""What the benchmark runs: suites of cases, each with its contenders."""
