"""Corpora that the first run makes: the Python standard library, and conversations."""

from __future__ import annotations

from collections.abc import Callable

from pangu.config.data import DataConfig, InstructionsData, StdlibData
from pangu.config.model import ModelConfig
from pangu.data.sources import pack, with_ids
from pangu.prepare.chat import portable_template
from pangu.prepare.instructions import prepare_instructions
from pangu.prepare.stdlib import prepare_stdlib

__all__ = ["portable_template", "prepare"]


def prepare(
    data: DataConfig, model: ModelConfig, show_progress: bool, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Create the files that a data source needs, or check that they exist; see `data.sources.pack`.

    May write files and be slow. Raises UserError.
    """
    data = with_ids(data)
    if isinstance(data, StdlibData):
        fraction = data.validation_fraction
        prepare_stdlib(data.folder, model.vocab, fraction, data.packing, show_progress, on_progress)
    elif isinstance(data, InstructionsData):
        prepare_instructions(data, model, show_progress, on_progress)
    pack(data, model, on_progress)
