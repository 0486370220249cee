"""The real standard library as the quickstart prepares it."""

from __future__ import annotations

from pathlib import Path

from pangu.config.data import PackingConfig
from pangu.data.stdlib import StdlibPaths
from pangu.prepare.stdlib import prepare_stdlib

PACKING = PackingConfig(eod=9, pad=6, reset_mask=True, reset_positions=True)
VOCAB = 1024
FRACTION = 0.05


def prepare_library(folder: Path) -> StdlibPaths:
    """Prepare it, unless the folder holds it."""
    return prepare_stdlib(folder, VOCAB, FRACTION, PACKING)
