"""Checkpoints and settings of other programs."""
