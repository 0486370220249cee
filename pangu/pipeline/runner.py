"""Runs a schedule: one stage's list of actions, with autograd inside each chunk and messages between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pangu.config.errors import LostError
from pangu.layers.attention import KVCache
from pangu.layers.dropout import DropoutKeys
from pangu.layers.root import Root
from pangu.models.parameters import ModelPart
from pangu.pipeline.actions import CONTENTS, Action, Kind
from pangu.pipeline.schedule import Schedule
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from pangu.topology.recorder import Recorder

if TYPE_CHECKING:
    from pangu.collectives.point_to_point import Channels, Transfer
    from pangu.layers.weight_gradient_store import WeightGradientStore

Key = tuple[int, int]
"""Chunk and micro-batch."""


class Carried(Protocol):
    """What one part hands to the next: tensors, None where there is none."""

    @property
    def hidden(self) -> Any:
        """What a result is made of, behind the last part."""

    def __iter__(self) -> Iterator[Tensor | None]: ...


class StageModel(Protocol):
    """What a stage computes with, such as `LanguageModel`."""

    def __call__(
        self, part: ModelPart, received: Any, batch: Any, keys: DropoutKeys | None, cache: KVCache | None
    ) -> Carried:
        """A part's output for a micro-batch; `received`: that of the part before, None for the first."""

    def carry(self, tensors: Sequence[Tensor]) -> Carried:
        """The tensors of a message, as `received`."""

    def shapes_behind(self, chunk: int, batch: Any, region: TensorRank) -> list[tuple[int, ...]]:
        """Shapes of the tensors that a chunk hands to the next for a micro-batch."""


M = TypeVar("M", bound=StageModel)


class StageError(LostError):
    """A message between stages failed."""


@dataclass
class _Live:
    received: Carried | None
    """The chunk's input, leaves."""
    root: Tensor
    gradients: list[Tensor]
    """Where backward finds the gradients of the chunk's output; empty for the last chunk."""


@dataclass
class ParameterHooks:
    """Called when the schedule says so, all but `begin` with a chunk."""

    unshard: Callable[[int], None] = lambda chunk: None
    """Its parameters, once gathered, are needed until `reshard`."""
    reshard: Callable[[int], None] = lambda chunk: None
    expect: Callable[[int, Collection[Tensor] | None], None] = lambda chunk, parameters: None
    """The gradients of these parameters (None: of all) are about to be made, with `reduce` behind them: what becomes
    complete may be reduced at once."""
    reduce: Callable[[int], None] = lambda chunk: None
    begin: Callable[[Action], None] = lambda action: None
    """An action begins."""


@dataclass
class Runner(Generic[M]):
    """One stage of a pipeline; with one stage, the whole model. At most the schedule's number of micro-batches is alive
    at a time. Messages begin where the schedule says and are waited for where their tensors are used; what is sent is
    freed once it has left."""

    model: M
    parts: Mapping[int, ModelPart]
    """Chunk -> its part of the model, for the chunks of this stage."""
    stage: int
    name: str
    """Of this process, for messages."""
    channels: Channels | None
    """None with one stage."""
    dtype: torch.dtype
    """Of the hidden states between chunks."""
    region: TensorRank
    store: WeightGradientStore | None = None
    hooks: ParameterHooks = field(default_factory=ParameterHooks)
    recorder: Recorder = field(default_factory=Recorder)
    """Of actions, and of the times that messages are waited for."""
    action: Action | None = field(default=None, init=False)
    """What is carried out, for messages."""
    began: float = field(default=0.0, init=False)
    """When it began to compute."""
    _live: dict[Key, _Live] = field(default_factory=dict, init=False, repr=False)
    _made: dict[tuple[str, int, int], list[Tensor]] = field(default_factory=dict, init=False, repr=False)
    """Outputs and input gradients not yet sent or used: kind, chunk that made it, micro-batch."""
    _arriving: dict[tuple[str, int, int], tuple[Action, Transfer]] = field(default_factory=dict, init=False, repr=False)
    """By the chunk that will use it."""
    _leaving: list[tuple[Action, Transfer]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def on(cls, mesh: Mesh, model: M, parts: Mapping[int, ModelPart], schedule: Schedule, **fields: Any) -> Runner[M]:
        """The stage of a rank of `mesh`, with the channels that a schedule's messages need; `fields` as above."""
        name = f"{mesh.name}, stage {mesh.at.pipeline}"
        channels = None
        if mesh.layout.pipeline > 1:
            from pangu.collectives.point_to_point import Channels

            channels = Channels(mesh, schedule.channels)
        return cls(model, parts, mesh.at.pipeline, name, channels, recorder=mesh.recorder, **fields)

    def run(
        self,
        schedule: Schedule,
        batches: Sequence[Any],
        end: Callable[[Any, Any], Tensor],
        keys: Sequence[DropoutKeys] | None = None,
        scale: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> list[Tensor]:
        """Run this stage's actions; returns, on the stage of the last chunk, what `end` returned for each micro-batch.

        Args:
            schedule: for as many micro-batches.
            batches: inputs and labels, e.g. `Batch`, on the device; every stage has all of them.
            end: makes a result of the last part's hidden states and its batch, e.g. `model.loss_of`.
            keys: of the dropout masks of each; None: no dropout.
            scale: gradients are those of the sum of the results times this.
            cache: of the only micro-batch, if its tokens continue others or others will continue them.

        Raises StageError, naming stage, action, micro-batch and peer, if another stage is gone or stuck.
        """
        assert schedule.micro_batches == len(batches)
        for pending in (self._live, self._made, self._arriving, self._leaving):
            pending.clear()  # of a run that failed
        results: list[Tensor] = []

        def root(hidden: Any, batch: Any) -> Tensor:
            result = end(hidden, batch)
            results.append(result.detach())
            return result if scale is None else result * scale

        for action in schedule.actions[self.stage]:
            self.action, self.began = action, time.perf_counter()
            self.hooks.begin(action)
            with self.recorder.span(action):
                match action.kind:
                    case Kind.FORWARD:
                        micro = _key(action)[1]
                        self._forward(action, batches[micro], keys[micro] if keys else None, root, cache)
                    case Kind.BACKWARD | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                        self._backward(action)
                    case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                        self._send(action)
                    case Kind.RECV_ACTIVATION | Kind.RECV_GRADIENT:
                        self._receive(action, batches)
                    case Kind.UNSHARD:
                        self.hooks.unshard(action.chunk)
                    case Kind.RESHARD:
                        self.hooks.reshard(action.chunk)
            self._free_sent()
        while self._leaving:
            self._wait(*self._leaving.pop(0))
        return results

    @torch.no_grad()
    def forward(
        self,
        schedule: Schedule,
        batches: Sequence[Any],
        end: Callable[[Any, Any], Tensor],
        cache: KVCache | None = None,
    ) -> list[Tensor]:
        """`run` a schedule of forwards only, without dropout and backward."""
        assert cache is None or len(batches) == 1
        return self.run(schedule, batches, end, cache=cache)

    def _forward(
        self,
        action: Action,
        batch: Any,
        keys: DropoutKeys | None,
        end: Callable[[Any, Any], Tensor],
        cache: KVCache | None,
    ) -> None:
        chunk, micro = _key(action)
        part, training = self.parts[chunk], torch.is_grad_enabled()
        received = None
        if not part.first:
            tensors = self._take("activation", chunk, chunk - 1, micro)
            received = self.model.carry([tensor.requires_grad_(training) for tensor in tensors])
        states = self.model(part, received, batch, keys, cache)
        gradients: list[Tensor] = []
        if part.last:
            root = end(states.hidden, batch)
        else:
            outputs = [tensor for tensor in states if tensor is not None]
            # `gradients` stays empty until the next chunk's backward has sent them; what is sent is freed at once
            root = Root.apply(gradients, *outputs) if training else outputs[0]
            self._made["activation", chunk, micro] = [tensor.detach() for tensor in outputs]
        if training:
            self._live[chunk, micro] = _Live(received, root, gradients)

    def _backward(self, action: Action) -> None:
        match action.kind:
            case Kind.BACKWARD:
                if action.reduce:
                    self.hooks.expect(action.chunk, None)
                self._go_back(action)
            case Kind.BACKWARD_INPUT:
                assert self.store is not None
                with self.store.open(_key(action)):
                    self._go_back(action)
            case Kind.BACKWARD_WEIGHT:
                assert self.store is not None
                if action.reduce:
                    self.hooks.expect(action.chunk, self.store.parameters(_key(action)))
                self.store.flush(_key(action))
        if action.reduce:
            self.hooks.reduce(action.chunk)

    def _go_back(self, action: Action) -> None:
        chunk, micro = _key(action)
        live = self._live.pop((chunk, micro))
        if not self.parts[chunk].last:
            live.gradients += self._take("gradient", chunk, chunk + 1, micro)
        if live.root.requires_grad:  # not if all that was computed is frozen
            live.root.backward()
        if live.received is not None:
            received = [tensor for tensor in live.received if tensor is not None]
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in received]
            self._made["gradient", chunk, micro] = gradients

    def _take(self, kind: str, chunk: int, neighbour: int, micro: int) -> Sequence[Tensor]:
        if (kind, neighbour, micro) in self._made:
            return self._made.pop((kind, neighbour, micro))
        tensors = self._wait(*self._arriving.pop((kind, chunk, micro)))
        self._free_sent()
        self.began = time.perf_counter()  # waiting is not work
        return tensors

    def _free_sent(self) -> None:
        self._leaving = [(action, transfer) for action, transfer in self._leaving if not transfer.is_done]

    def _send(self, action: Action) -> None:
        kind = CONTENTS[action.kind]
        tensors = self._made.pop((kind, *_key(action)))
        assert self.channels is not None
        assert action.peer is not None
        with self._meeting(action):
            self._leaving.append((action, self.channels.send(kind, tensors, action.peer)))

    def _receive(self, action: Action, batches: Sequence[Any]) -> None:
        kind, (chunk, micro) = CONTENTS[action.kind], _key(action)
        assert self.channels is not None
        assert action.peer is not None
        maker = chunk - 1 if action.kind is Kind.RECV_ACTIVATION else chunk
        shapes = self.model.shapes_behind(maker, batches[micro], self.region)
        with self._meeting(action):
            self._arriving[kind, chunk, micro] = action, self.channels.receive(kind, shapes, self.dtype, action.peer)

    def _wait(self, action: Action, transfer: Transfer) -> Sequence[Tensor]:
        with self._meeting(action), self.recorder.span(action):
            return transfer.wait()

    @contextmanager
    def _meeting(self, action: Action) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StageError(
                f"{self.name}: {action}: did not come through within parallel.timeout_s, or the other side is "
                f"gone; what that stage says, if it still speaks, is the cause ({error})"
            ) from error


def _key(action: Action) -> Key:
    assert action.micro is not None
    return action.chunk, action.micro
