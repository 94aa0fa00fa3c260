"""What experiments print and write of their results."""
