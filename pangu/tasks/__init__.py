"""Benchmark tasks: their files, prompts, measures and results."""
