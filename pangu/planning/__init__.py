"""Planner: predicted step time and peak memory of layouts, and the search for the fastest layout."""
