"""Carries out a schedule: one stage's list of actions, with autograd inside each chunk and messages between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.messages import Channels, Message
from pangu.collectives.regions import TensorRegion
from pangu.config.errors import LocalError
from pangu.data.batch import Batch
from pangu.layers.cache import Cache
from pangu.layers.deferred import WeightGradients
from pangu.layers.dropout import DropoutKeys
from pangu.models.block import Carried
from pangu.models.language_model import LanguageModel, Part
from pangu.pipeline.actions import Action, Kind
from pangu.pipeline.schedule import Schedule
from pangu.pipeline.simulate import Event
from pangu.pipeline.stages import carried_shapes

Key = tuple[int, int]
"""Chunk and micro-batch."""
KINDS = {
    Kind.SEND_ACTIVATION: "activation",
    Kind.RECV_ACTIVATION: "activation",
    Kind.SEND_GRADIENT: "gradient",
    Kind.RECV_GRADIENT: "gradient",
}
"""What a message holds."""


class StageError(LocalError):
    """A message between stages did not come through."""


class _Leaving(Function):
    """Stands at the end of a chunk for what it hands over, which is freed as soon as it is sent: backward needs the
    graph that made it, not its values."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


@dataclass
class _Live:
    """What is kept of a forward until its backward."""

    received: Carried | None
    """The chunk's input, leaves."""
    root: Tensor
    """Where backward begins, a scalar."""
    gradients: list[Tensor]
    """Where backward finds the gradients of what the chunk hands over; empty for the last chunk."""


@dataclass
class Hooks:
    """What the owner of the parameters does when the schedule says so; all take a chunk."""

    gather: Callable[[int], None] = lambda chunk: None
    """Its parameters are needed soon."""
    release: Callable[[int], None] = lambda chunk: None
    """Its parameters are not needed for a while."""
    expect: Callable[[int, bool], None] = lambda chunk, last: None
    """A whole backward of it is about to run, perhaps the last one: what becomes complete may be reduced at once."""
    done: Callable[[int], None] = lambda chunk: None
    """That backward has run."""
    reduce: Callable[[int], None] = lambda chunk: None
    """Its gradients are complete."""


@dataclass
class Runner:
    """One stage of a pipeline; with one stage, the whole model.

    At most the schedule's number of micro-batches is alive at a time. Messages are begun where the schedule says and
    waited for where their tensors are used; what is sent is kept until it has left and freed then.
    """

    model: LanguageModel
    parts: Mapping[int, Part]
    """Chunk -> the part of the model that it is, for the chunks of this stage."""
    stage: int
    name: str
    """Of this process, for messages."""
    channels: Channels | None
    """None with one stage."""
    dtype: torch.dtype
    """Format of the hidden states between chunks."""
    later: WeightGradients
    """Where the model's linear layers put weight gradients aside that a schedule computes later."""
    hooks: Hooks = field(default_factory=Hooks)
    events: list[Event] | None = None
    """Filled with what was done and when, if it is a list."""
    region: TensorRegion = field(default_factory=TensorRegion)
    """Ranks that share this stage's matrices."""

    def train(
        self, schedule: Schedule, batches: Sequence[Batch], keys: Sequence[DropoutKeys], scale: float
    ) -> Tensor | None:
        """Forward and backward of all micro-batches.

        Args:
            schedule: for as many micro-batches.
            batches: inputs and labels, on the device; every stage has all of them.
            keys: of the dropout masks of each.
            scale: gradients are those of the summed loss times this.

        Returns:
            The sum of all token losses (fp64 scalar) on the stage of the last chunk, None on the others.

        Raises:
            StageError: naming stage, action, micro-batch and peer, if another stage is gone or stuck.
        """
        losses: list[Tensor] = []

        def end(hidden: Tensor, batch: Batch) -> Tensor:
            loss = self.model.loss_of(hidden, batch)
            losses.append(loss.detach())
            return loss * scale

        _Pass(self, schedule, batches, keys, end).run()
        return torch.stack(losses).double().sum() if losses else None

    def now(self) -> float:
        """Seconds, once all that was queued on the device is done if events are recorded."""
        if self.events is not None and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    @torch.no_grad()
    def forward(
        self,
        schedule: Schedule,
        batches: Sequence[Batch],
        end: Callable[[Tensor, Batch], Tensor],
        cache: Cache | None = None,
    ) -> list[Tensor]:
        """Forward of all micro-batches without dropout.

        Args:
            schedule: forwards only, for as many micro-batches.
            batches: as for `train`.
            end: what to make of the hidden states that the last part returned, e.g. `model.loss_of`.
            cache: of the one micro-batch, if its tokens follow on others or others will follow on them.

        Returns:
            What `end` returned for each micro-batch, on the stage of the last chunk; an empty list on the others.
        """
        results: list[Tensor] = []

        def collect(hidden: Tensor, batch: Batch) -> Tensor:
            results.append(end(hidden, batch))
            return results[-1]

        assert cache is None or len(batches) == 1
        _Pass(self, schedule, batches, [None] * len(batches), collect, cache).run()
        return results


class _Pass:
    """One step: what is alive and what is on its way."""

    def __init__(
        self,
        runner: Runner,
        schedule: Schedule,
        batches: Sequence[Batch],
        keys: Sequence[DropoutKeys | None],
        end: Callable[[Tensor, Batch], Tensor],
        cache: Cache | None = None,
    ) -> None:
        assert schedule.micro_batches == len(batches)
        self.runner, self.schedule = runner, schedule
        self.actions = schedule.actions[runner.stage]
        self.batches, self.keys, self.end, self.cache = batches, keys, end, cache
        self.live: dict[Key, _Live] = {}
        self.made: dict[tuple[str, int, int], list[Tensor]] = {}
        """Outputs and input gradients that are not yet sent or used: kind, chunk that made it, micro-batch."""
        self.arriving: dict[tuple[str, int, int], tuple[Action, Message]] = {}
        """Under the chunk that will use it."""
        self.leaving: list[tuple[Action, Message]] = []
        self.began = 0.0
        """When the action that is carried out began to compute."""
        backwards = {action.chunk: place for place, action in enumerate(self.actions) if action.kind is Kind.BACKWARD}
        self.last_backwards = set(backwards.values())
        """Where in the list each chunk's last whole backward stands."""

    def run(self) -> None:
        """Carry out the list."""
        events = self.runner.events
        for place, action in enumerate(self.actions):
            self.began = self.runner.now()
            self._carry_out(place, action)
            if events is not None:
                events.append(Event(self.runner.stage, action, self.began, self.runner.now()))
            self._let_go()
        for action, message in self.leaving:
            self._wait(action, message)

    def _carry_out(self, place: int, action: Action) -> None:
        hooks, chunk = self.runner.hooks, action.chunk
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD:
                hooks.expect(chunk, place in self.last_backwards)
                self._backward(action)
                hooks.done(chunk)
            case Kind.BACKWARD_INPUT:
                with self.runner.later.held(_key(action)):
                    self._backward(action)
            case Kind.BACKWARD_WEIGHT:
                self.runner.later.compute(_key(action))
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._send(action)
            case Kind.RECV_ACTIVATION | Kind.RECV_GRADIENT:
                self._receive(action)
            case Kind.GATHER:
                hooks.gather(chunk)
            case Kind.RELEASE:
                hooks.release(chunk)
            case Kind.REDUCE:
                hooks.reduce(chunk)

    def _forward(self, action: Action) -> None:
        chunk, micro = _key(action)
        runner, batch = self.runner, self.batches[micro]
        part = runner.parts[chunk]
        training = torch.is_grad_enabled()
        received = None
        if not part.first:
            tensors = self._take("activation", chunk, chunk - 1, micro)
            received = Carried(*(tensor.requires_grad_(training) for tensor in tensors))
        carried: Carried = runner.model(part, received, batch, self.keys[micro], self.cache)
        gradients: list[Tensor] = []
        if part.last:
            root = self.end(carried.hidden, batch)
        else:
            outputs = [tensor for tensor in carried if tensor is not None]
            root = _Leaving.apply(gradients, *outputs) if training else outputs[0]
            self.made["activation", chunk, micro] = [tensor.detach() for tensor in outputs]
        if training:
            self.live[chunk, micro] = _Live(received, root, gradients)

    def _backward(self, action: Action) -> None:
        chunk, micro = _key(action)
        live = self.live.pop((chunk, micro))
        if not self.runner.parts[chunk].last:
            live.gradients += self._take("gradient", chunk, chunk + 1, micro)
        if live.root.requires_grad:  # not if all that was computed is frozen
            live.root.backward()
        if live.received is not None:
            received = [tensor for tensor in live.received if tensor is not None]
            self.made["gradient", chunk, micro] = [
                t.grad if t.grad is not None else torch.zeros_like(t) for t in received
            ]

    def _take(self, kind: str, chunk: int, neighbour: int, micro: int) -> Sequence[Tensor]:
        """What a neighbouring chunk made for `chunk`: from its stage, or from here."""
        if (kind, neighbour, micro) in self.made:
            return self.made.pop((kind, neighbour, micro))
        action, message = self.arriving.pop((kind, chunk, micro))
        tensors = self._wait(action, message)
        self._let_go()  # of what left in the meantime
        self.began = self.runner.now()  # waiting is not work
        return tensors

    def _let_go(self) -> None:
        """Free what has left."""
        self.leaving = [(sent, message) for sent, message in self.leaving if not message.is_done]

    def _send(self, action: Action) -> None:
        kind = KINDS[action.kind]
        tensors = self.made.pop((kind, *_key(action)))
        assert self.runner.channels is not None
        assert action.peer is not None
        with self._meeting(action):
            self.leaving.append((action, self.runner.channels.send(kind, tensors, action.peer)))

    def _receive(self, action: Action) -> None:
        kind, (chunk, micro) = KINDS[action.kind], _key(action)
        runner = self.runner
        assert runner.channels is not None
        assert action.peer is not None
        shapes = carried_shapes(runner.model.config, runner.region, self.batches[micro])
        with self._meeting(action):
            message = runner.channels.receive(kind, shapes, runner.dtype, action.peer)
        self.arriving[kind, chunk, micro] = action, message

    def _wait(self, action: Action, message: Message) -> Sequence[Tensor]:
        with self._meeting(action):
            return message.wait()

    @contextmanager
    def _meeting(self, action: Action) -> Iterator[None]:
        """Turn a failure of a message into an error that says which one it was."""
        try:
            yield
        except RuntimeError as error:
            raise StageError(
                f"{self.runner.name}: {action}: did not come through within parallel.timeout_s, or the other side is "
                f"gone; what that stage says, if it still speaks, is the cause ({error})"
            ) from error


def _key(action: Action) -> Key:
    assert action.micro is not None
    return action.chunk, action.micro
