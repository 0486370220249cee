"""Initial weights of a mixture of experts from a dense model (Komatsuzaki et al. 2022, section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pangu.checkpoint.files import Slice
from pangu.checkpoint.index import read_index
from pangu.common.errors import UserError

_EXPERT = re.compile(r"(layers\.\d+\.mlp)\.experts\.\d+")
_ROUTER = re.compile(r"layers\.\d+\.mlp\.router\..*")


def of_dense_model(weights: Iterable[tuple[str, Slice]]) -> Iterator[tuple[str, Slice]]:
    """Yield a model's slices named by the dense tensors that fill them, without routers, which a dense model lacks."""
    for name, part in weights:
        if not _ROUTER.fullmatch(name):
            yield _EXPERT.sub(r"\1", name), part


def require_kind(path: Path, dense: bool) -> None:
    """Raise UserError unless a checkpoint is of a dense model, or of one with experts."""
    experts = any("/layers." in name and ".mlp.experts." in name for name in read_index(path)["tensors"])
    if dense and experts:
        raise UserError(f"{path}: its model has experts; set checkpoint.upcycle=false to start from its weights")
    if not dense and not experts:
        raise UserError(
            f"{path}: its model has no experts; set checkpoint.upcycle=true to copy its dense layers into experts"
        )
