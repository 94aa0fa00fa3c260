"""Training: state and step, checkpoints, records."""
