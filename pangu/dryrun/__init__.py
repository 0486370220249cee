"""Dry runs: steps of single ranks on fake tensors, to measure memory, work and communication without a device."""
