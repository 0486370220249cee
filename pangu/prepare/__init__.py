"""Preparation of a corpus: from documents to files of tokens, in parallel and resumable."""
