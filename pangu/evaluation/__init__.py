"""Evaluation of a model in any layout: inference and text generation."""
