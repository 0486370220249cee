"""Datasets, tokenizers and batches: from texts or files of tokens to training samples."""
