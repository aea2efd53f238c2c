"""How a batch is cut into work."""
