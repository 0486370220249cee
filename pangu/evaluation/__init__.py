"""Evaluation of a model in any layout: inference, scoring and text generation."""
