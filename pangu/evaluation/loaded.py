"""A model that can be asked: what was loaded, or what is being trained."""

from __future__ import annotations

from dataclasses import dataclass

from pangu.config.model import ModelConfig
from pangu.data.tokenizers import Tokenizer
from pangu.pipeline.runner import Runner
from pangu.pipeline.schedule import Schedule
from pangu.topology.mesh import Mesh


@dataclass(frozen=True)
class LoadedModel:
    """A model that is spread over the ranks of a mesh. What is asked of it, all ranks of one replica ask together."""

    runner: Runner
    """Of this rank's stage; `runner.model` is what this rank holds."""
    schedule: Schedule
    """Its stages are used."""
    mesh: Mesh
    config: ModelConfig
    """The architecture; `config.sequence` is the longest text."""
    tokenizer: Tokenizer | None
    """Of the data that it was trained on, if that has one."""
    eod: int | None
    """Id that ends a document, if there is one."""
    rows: int = 8
    """Texts computed at a time."""
    stop: tuple[int, ...] = ()
    """Ids that end a generated text beside `eod`."""
