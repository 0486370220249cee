"""Tokenization of documents in any process, and selection of held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError, reading
from pangu.config.data import TokenizerConfig
from pangu.data.tokenizers import load_tokenizer
from pangu.topology.random import random_key

_LARGEST_VOCABULARY = 128 << 20


def encode(
    texts: Sequence[str], tokenizer: TokenizerConfig, vocab: int, eod: int | None, bos: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return all ids, with `bos` and `eod` if given, and ids per text. Raises UserError for ids outside `vocab`."""
    encoder = cached_tokenizer(tokenizer)
    ids: list[int] = []
    stops = [0]
    for text in texts:
        if bos is not None:
            ids.append(bos)
        ids += encoder.encode(text)
        if eod is not None:
            ids.append(eod)
        stops.append(len(ids))
    tokens = np.array(ids, dtype=np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise UserError(f"{tokenizer.path}: produced the id {tokens.max()}, outside its vocabulary")
    return tokens, np.diff(np.array(stops, dtype=np.int64)).astype(np.int32)


cached_tokenizer = cache(load_tokenizer)
"""Cached `load_tokenizer`: each process loads a tokenizer once."""


def held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the held-out share of all documents, chosen by a hash of its text."""
    return share > 0 and random_key("held out", text) < share * 2**64


def tokenizer_digest(path: str) -> str:
    """Return the digest of a tokenizer's file or folder; "" without a path. Raises UserError if it cannot be read."""
    digest = blake2b(digest_size=16)
    if not path:
        return ""
    whole = Path(path)
    with reading(path):
        for file in sorted(file for file in whole.rglob("*") if file.is_file()) if whole.is_dir() else [whole]:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(whole)}\n{size}\n".encode())
            if size <= _LARGEST_VOCABULARY:  # the folder may also hold a model's weights
                digest.update(file.read_bytes())
    return digest.hexdigest()
