"""Prepared conversations, which `prepare.instructions` encodes: tokens and loss masks as samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pangu.common.errors import UserError, reading
from pangu.config.data import InstructionsData, PackingConfig
from pangu.config.model import ModelConfig
from pangu.data.packing import PackedDocuments, Packing

PREPARED = "instructions"
"""Subfolder of `data.folder` with the prepared files."""


def counted_path(prefix: str | Path) -> Path:
    """Return the loss mask of a prefix, a file with a byte for each token."""
    return Path(f"{prefix}.counted")


def open_dataset(packing: Packing, vocab: int, ids: PackingConfig) -> PackedDocuments:
    """Open packed conversations with their loss mask. Raises UserError."""
    path = counted_path(packing.prefix)
    with reading(path, ValueError):  # an empty file cannot be mapped
        counted = np.memmap(path, np.uint8, "r")
    documents = PackedDocuments(packing, vocab, ids, counted)
    if len(counted) != len(documents.reader.tokens):
        raise UserError(f"{path}: damaged; remove {path.parent}, and pretrain.py prepares it again")
    return documents


def conversation_packing(data: InstructionsData, model: ModelConfig, name: str) -> Packing:
    """Return the packing of one prepared dataset, e.g. `train-0`."""
    assert data.packing.method != "concat"
    prefix = str(Path(data.folder) / PREPARED / name)
    return Packing(prefix, model.sequence, data.packing.method, data.packing.index, first_is_input=True)


def dataset_names(split: str, files: Sequence[str]) -> tuple[str, ...]:
    """Return the names in the folder of the datasets of a split."""
    return tuple(f"{split}-{number}" for number in range(len(files)))
