"""The page format, its keys, and the store: knows bytes, never tensors."""
