"""Rotary positions, and the scalings of their frequencies."""
