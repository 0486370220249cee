"""Checkpoints in logical space: writing, reading under any layout, and run folders."""
