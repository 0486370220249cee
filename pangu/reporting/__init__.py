"""Pages that compare runs."""
