"""pangu: trains GPT and PanGu-α language models from one process to thousands of accelerators."""

__version__ = "0.1.0"
