"""Web pages that compare runs."""
