"""Checkpoints in logical space: writing, reading under any layout, run folders, and conversion."""
