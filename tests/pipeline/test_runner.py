"""The runner does what stands in the schedule's table, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.collectives.messages import Channels, Message
from pangu.data.batch import Batch
from pangu.evaluation.perplexity import mean_loss
from pangu.layers.deferred import WeightGradients
from pangu.models.block import Carried
from pangu.models.language_model import LanguageModel, Part
from pangu.pipeline.actions import Action, Kind
from pangu.pipeline.runner import Key
from pangu.pipeline.schedule import forward_only
from pangu.topology.layout import Layout
from pangu.training.step import Trainer
from pangu.zero.gradients import GradientSum
from pangu.zero.parameters import Weights
from pangu.zero.units import Unit
from tests.parallel.harness import small_trainer
from tests.parallel.test_layouts import CHUNKS
from tests.parallel.test_pipeline import MODEL
from tests.threads import Ranks, replaced_here


class Recorder:
    """The actions of one rank, told from what is called below the runner and from the tensors that go in and out."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.reduced: dict[int, list[Unit]] = {}
        """Index of an action -> units whose reduction began in or behind it."""
        self.tensors: dict[tuple[str, Key], Tensor] = {}
        """Input, output and gradient of the output of each chunk and micro-batch. All are kept: no two have the same
        address."""
        self.receives: dict[int, Tensor] = {}
        """Index of an action -> what is received."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what the calling thread does, with a trainer that is made within the block."""
        with (
            replaced_here(LanguageModel, hidden=self.hidden, loss_of=self.loss_of),
            replaced_here(WeightGradients, compute=self.compute),
            replaced_here(Weights, hold=self.hold, let_go=self.let_go),
            replaced_here(GradientSum, _start=self.start),
            replaced_here(Channels, send=self.send, receive=self.receive),
        ):
            yield
