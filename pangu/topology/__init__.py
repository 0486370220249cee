"""Layouts, meshes, placements of tensors, and random numbers that no layout changes."""
