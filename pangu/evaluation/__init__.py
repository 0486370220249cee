"""Evaluation of models: loading, text generation, scoring, and benchmark tasks."""
