"""Benchmark tasks: their files, prompts, scores, measures and results."""
