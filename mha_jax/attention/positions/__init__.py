"""What tells where a token stands: rotary positions and their scalings."""
