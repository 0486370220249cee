"""Metrics of a run: records, writers and trackers, plots, progress bars, and the throughput of devices."""
