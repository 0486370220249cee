"""Small models to ask, with random weights, on any layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pangu.data.tokenizers import Tokenizer
from pangu.evaluation.inference import LoadedModel
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import parallel_keys


class Characters:
    """A tokenizer whose tokens are characters: 3 + place in `ALPHABET`; others are token 1, and 2 ends a document."""

    ALPHABET = "\n abcdefghijklmnopqrstuvwxyz甲乙丙丁是不对错问答文章：，。？0123456789XYZ"
    vocab_size = 3 + len(ALPHABET)
    eod = 2

    def encode(self, text: str) -> list[int]:
        return [3 + self.ALPHABET.index(sign) if sign in self.ALPHABET else 1 for sign in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.ALPHABET[i - 3] for i in ids if 3 <= i < self.vocab_size)


def random_model(layout: Layout, *overrides: str, tokenizer: Tokenizer | None = None, rows: int = 3) -> LoadedModel:
    """A model that was not trained; `model.sequence` is 16."""
    config = tiny("precision=fp64", "model.init_std=0.5", *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    runner, schedule = trainer.runner, trainer.stages.schedule
    eod = None if tokenizer is None else tokenizer.eod
    return LoadedModel(runner, schedule, trainer.mesh, config.model, tokenizer, eod, rows)
