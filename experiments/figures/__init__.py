"""Figures of the experiments: a file for each kind."""
