"""Experiments: one question per script."""
