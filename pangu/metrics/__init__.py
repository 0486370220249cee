"""Metrics of a run: records, writers and trackers, plots, and the throughput of devices."""
