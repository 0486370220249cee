"""Checkpoint formats of other programs, and the conversion between them."""
