"""What trained heads do, and what they cost."""
