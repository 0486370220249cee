"""Datasets, tokenizers and preprocessing: from text files to batches of training samples."""
