"""The runner does what stands in the schedule's table, all of it and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from pangu.collectives.point_to_point import Channels, Transfer
from pangu.data.batch import Batch
from pangu.evaluation.inference import mean_loss
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.models.block import HiddenStates
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Key
from pangu.schedule.actions import Action, Kind
from pangu.schedule.schedule import forward_only
from pangu.topology.layout import Layout
from pangu.training.step import Trainer
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.gradients import GradientSum
from pangu.zero.unshard import Unsharder
from tests.parallel.cases import CHUNKS
from tests.parallel.harness import small_trainer
from tests.parallel.test_pipeline import MODEL
from tests.threads import Ranks, replaced_here


class Recorder:
    """What one rank does, told from the calls below the runner and the tensors in them.

    A forward is told from its part of the model and its batch, a backward from the gradient that comes to the chunk's
    output, a message from whose tensor it is, a reduction from the unit that is sent.
    """

    def __init__(self) -> None:
        self.trainer: Trainer
        self.batches: Sequence[Batch]
        self.actions: list[Action] = []
        self.units: dict[int, list[FlatParameter]] = {}
        """Place in `actions` -> the units whose reduction was begun there."""
        self.receives: dict[int, Tensor] = {}
        self.key: Key
        """Of the newest forward."""
        self.tensors: dict[tuple[str, Key], Tensor] = {}
        """Input, output, and gradient of the output of each chunk and micro-batch; kept, so that no other tensor has
        the address of one of them."""

    def forward(
        self, model: LanguageModel, part: ModelPart, received: HiddenStates | None, batch: Batch, *more: Any
    ) -> HiddenStates:
        chunk = {here: chunk for chunk, here in self.trainer.runner.parts.items()}[part]
        self.key = chunk, [each.samples for each in self.batches].index(batch.samples)
        self.actions.append(Action(Kind.FORWARD, *self.key))
        carried = LanguageModel.forward(model, part, received, batch, *more)
        if received is not None:
            self.tensors["input", self.key] = received.hidden
        if not part.last:
            self.watch_backward(carried.hidden)
        return carried

    def loss_of(self, model: LanguageModel, *more: Any, **scale: Tensor) -> Tensor:
        loss = LanguageModel.loss_of(model, *more, **scale)
        self.watch_backward(loss)
        return loss

    def watch_backward(self, output: Tensor) -> None:
        key = self.key
        self.tensors["output", key] = output.detach()

        def hook(gradient: Tensor) -> None:
            self.tensors["gradient", key] = gradient
            store = self.trainer.runner.store
            kind = Kind.BACKWARD_INPUT if store is not None and store.is_open else Kind.BACKWARD
            self.actions.append(Action(kind, *key))

        if output.requires_grad:
            output.register_hook(hook)

    def compute(self, store: WeightGradientStore, key: Key) -> None:
        self.actions.append(Action(Kind.BACKWARD_WEIGHT, *key))
        WeightGradientStore.flush(store, key)

    def unshard(self, weights: Unsharder, chunk: int) -> None:
        self.actions.append(Action(Kind.UNSHARD, chunk))
        Unsharder.unshard(weights, chunk)

    def reshard(self, weights: Unsharder, chunk: int) -> None:
        self.actions.append(Action(Kind.RESHARD, chunk))
        Unsharder.reshard(weights, chunk)

    def start(self, gradients: GradientSum, unit: FlatParameter) -> Any:
        if unit not in gradients.flat_parameters.get(-1, ()):  # what several chunks use is reduced behind the list
            self.actions[-1] = self.actions[-1]._replace(reduce=True)
            self.units.setdefault(len(self.actions) - 1, []).append(unit)
        return GradientSum._start(gradients, unit)

    def send(self, channels: Channels, kind: str, tensors: Sequence[Tensor], peer: int) -> Transfer:
        if kind == "activation":
            self.actions.append(Action(Kind.SEND_ACTIVATION, *self.find("output", tensors[0]), peer))
        else:
            self.actions.append(Action(Kind.SEND_GRADIENT, *self.find("input", tensors[0]), peer))
        return Channels.send(channels, kind, tensors, peer)

    def receive(self, channels: Channels, kind: str, shapes: Any, dtype: Any, peer: int) -> Transfer:
        message = Channels.receive(channels, kind, shapes, dtype, peer)
        self.receives[len(self.actions)] = message.tensors[0]
        # what it is of shows when it is used
        self.actions.append(Action(Kind.RECV_ACTIVATION if kind == "activation" else Kind.RECV_GRADIENT, 0, 0, peer))
        return message

    def find(self, what: str, tensor: Tensor) -> Key:
        """Chunk and micro-batch whose input (or the gradient of it) or output, or gradient of that, this is."""
        (key,) = [
            key
            for (name, key), known in self.tensors.items()
            if name == what
            and tensor.data_ptr() in (known.data_ptr(), None if known.grad is None else known.grad.data_ptr())
        ]
        return key

    def done(self) -> list[Action]:
        """What was recorded since the last call."""
        for place, tensor in self.receives.items():
            action = self.actions[place]
            what = "input" if action.kind is Kind.RECV_ACTIVATION else "gradient"
            self.actions[place] = Action(action.kind, *self.find(what, tensor), action.peer)
        for place, units in self.units.items():  # all of a chunk, once, and in order
            assert units == self.trainer.parameters.gradients.flat_parameters[self.actions[place].chunk]
        actions = self.actions
        self.actions, self.units, self.receives, self.tensors = [], {}, {}, {}
        return actions


def record(rank: int, world: int, layout: Layout, *overrides: str) -> None:
    """A step, and a loss on held-out batches, against the tables."""
    recorder = Recorder()
    with (
        replaced_here(LanguageModel, forward=recorder.forward, loss_of=recorder.loss_of),
        replaced_here(WeightGradientStore, flush=recorder.compute),
        replaced_here(Unsharder, unshard=recorder.unshard, reshard=recorder.reshard),
        replaced_here(GradientSum, _start=recorder.start),
    ):
        trainer, batches = small_trainer(layout, *MODEL, *overrides)
        recorder.trainer, recorder.batches = trainer, batches
        schedule, stage = trainer.stages.schedule, trainer.mesh.at.pipeline
        with replaced_here(Channels, send=recorder.send, receive=recorder.receive):
            trainer.train_step(batches)
            assert recorder.done() == list(schedule.actions[stage])
            mean_loss(trainer.runner, schedule, batches, trainer.mesh)
            assert recorder.done() == list(forward_only(schedule, len(batches)).actions[stage])


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(pipeline=2, data=2, zero=3), Layout(data=2, zero=3)], ids=str
)
@pytest.mark.parametrize("schedule", CHUNKS)
def test_the_table_is_what_is_done(ranks: Ranks, schedule: str, layout: Layout) -> None:
    layout = replace(layout, virtual_stages=CHUNKS[schedule])
    overrides = (f"parallel.schedule={schedule}", f"batch.global_size={3 * layout.data}", "model.layers=5")
    ranks.run(layout.world, record, layout, *overrides)
