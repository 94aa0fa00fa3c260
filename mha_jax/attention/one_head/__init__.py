"""Attention of one head: exact, by blocks, and its dropout."""
