"""Execution of a schedule: one stage's list of actions, with autograd inside each chunk and messages in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pangu.collectives.point_to_point import Channels
from pangu.collectives.regions import TensorRegion
from pangu.common.errors import LostError
from pangu.layers.attention import KVCache
from pangu.layers.dropout import DropoutKeys
from pangu.layers.root import Root
from pangu.models.parameters import ModelPart
from pangu.schedule.actions import CONTENTS, Action, Kind
from pangu.schedule.schedule import Schedule
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from pangu.topology.recorder import Recorder

if TYPE_CHECKING:
    from pangu.collectives.point_to_point import Transfer
    from pangu.layers.weight_gradient_store import WeightGradientStore
    from pangu.zero.sharded import ShardedParameters

Key = tuple[int, int]
"""Chunk and micro-batch."""


class StageOutput(Protocol):
    """Tensors that one part of a model passes to the next; None for an absent one."""

    @property
    def hidden(self) -> Any:
        """Hidden states from which a result is made, after the last part."""

    def __iter__(self) -> Iterator[Tensor | None]:
        """Iterate over the tensors."""


class StageModel(Protocol):
    """Model that a stage computes with, such as `LanguageModel`."""

    def __call__(
        self, part: ModelPart, received: Any, batch: Any, keys: DropoutKeys | None, cache: KVCache | None
    ) -> StageOutput:
        """Return a part's output for a micro-batch; `received`: output of the previous part, None for the first."""

    def from_message(self, tensors: Sequence[Tensor]) -> StageOutput:
        """Wrap the tensors of a message for use as `received`."""

    def output_shapes(self, chunk: int, batch: Any, region: TensorRank) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a chunk sends to the next one for a micro-batch."""


M = TypeVar("M", bound=StageModel)


class StageError(LostError):
    """Error for a failed message between stages."""


@dataclass
class _Live:
    received: StageOutput | None
    """Input of the chunk, as leaves of the graph."""
    root: Tensor
    gradients: list[Tensor]
    """Gradients of the chunk's output, filled in before its backward pass; empty for the last chunk."""


# Messages start where the schedule says, and are waited for where their tensors are used; sent tensors are freed as
# soon as they have left. At most the schedule's number of micro-batches is alive at a time.
@dataclass
class Runner(Generic[M]):
    """Runner of one pipeline stage, or of the full model if there is only one."""

    model: M
    parts: Mapping[int, ModelPart]
    """Chunks of this stage with their parts of the model."""
    stage: int
    name: str
    channels: Channels | None
    """Message channels; None with one stage."""
    dtype: torch.dtype
    """Dtype of the hidden states between chunks."""
    region: TensorRank
    store: WeightGradientStore | None = None
    parameters: ShardedParameters | None = None
    """Parameters to unshard and reduce when the schedule says; None: those of the model are there, and not trained."""
    on_action: Callable[[Action], None] | None = None
    """Callback that receives every action before it is executed."""
    recorder: Recorder = field(default_factory=Recorder)
    action: Action | None = field(default=None, init=False)
    began: float = field(default=0.0, init=False)
    """Start time of the current action's computation, as of `time.perf_counter`."""
    _live: dict[Key, _Live] = field(default_factory=dict, init=False, repr=False)
    _made: dict[tuple[str, int, int], list[Tensor]] = field(default_factory=dict, init=False, repr=False)
    """Outputs and input gradients not yet sent or used, by kind, chunk that computed them and micro-batch."""
    _arriving: dict[tuple[str, int, int], tuple[Action, Transfer]] = field(default_factory=dict, init=False, repr=False)
    """Receives in flight, by kind, chunk that uses them and micro-batch."""
    _leaving: list[tuple[Action, Transfer]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def on(
        cls,
        mesh: Mesh,
        model: M,
        parts: Mapping[int, ModelPart],
        schedule: Schedule,
        dtype: torch.dtype,
        region: TensorRank | None = None,
        **fields: Any,
    ) -> Runner[M]:
        """Return the runner of this rank's stage, with the channels of a schedule and further `fields`."""
        name = f"{mesh.name}, stage {mesh.at.pipeline}"
        channels = Channels(mesh, schedule.channels) if mesh.layout.pipeline > 1 else None
        region = TensorRegion.of(mesh) if region is None else region
        return cls(model, parts, mesh.at.pipeline, name, channels, dtype, region, recorder=mesh.recorder, **fields)

    def run(
        self,
        schedule: Schedule,
        batches: Sequence[Any],
        end: Callable[[Any, Any], Tensor],
        keys: Sequence[DropoutKeys] | None = None,
        scale: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> list[Tensor]:
        """Run this stage's actions; return what `end` returned per micro-batch, on the stage of the last chunk only.

        Raise `StageError`, which names stage, action, micro-batch and peer, if another stage is gone or hangs.

        Args:
            schedule: Schedule for this number of micro-batches.
            batches: Inputs and labels (e.g. `Batch`) of all micro-batches, on the device, on every stage.
            end: Function from the hidden states of the last part and its batch to a result, e.g. `model.loss_of`.
            keys: Dropout keys of each micro-batch; None: no dropout.
            scale: Factor on the gradients of the sum of the results.
            cache: Keys and values of the only micro-batch, if its tokens continue others or will be continued.
        """
        assert schedule.micro_batches == len(batches)
        for pending in (self._live, self._made, self._arriving, self._leaving):
            pending.clear()  # left by a failed run
        if self.parameters is not None:
            self.parameters.unsharder.restart()
        results: list[Tensor] = []

        def root(hidden: Any, batch: Any) -> Tensor:
            result = end(hidden, batch)
            results.append(result.detach())
            return result if scale is None else (result.sum() if result.dim() else result) * scale

        for action in schedule.actions[self.stage]:
            self.action, self.began = action, time.perf_counter()
            if self.on_action is not None:
                self.on_action(action)
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
                    case Kind.UNSHARD if self.parameters is not None:
                        self.parameters.unsharder.unshard(action.chunk)
                    case Kind.RESHARD if self.parameters is not None:
                        self.parameters.unsharder.reshard(action.chunk)
            self._free_sent()
        # all actions are done: wait for the sends in flight
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
        """Run a schedule of forward passes only, without dropout."""
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
        # hidden states of the chunk before: from another stage, or from this one (interleaved, V-shaped)
        received = None
        if not part.first:
            tensors = self._take("activation", chunk, chunk - 1, micro)
            received = self.model.from_message([tensor.requires_grad_(training) for tensor in tensors])
        states = self.model(part, received, batch, keys, cache)
        gradients: list[Tensor] = []
        if part.last:
            root = end(states.hidden, batch)
        else:
            outputs = [tensor for tensor in states if tensor is not None]
            # `gradients` stays empty until the next chunk's backward pass has sent them; sent tensors are freed early
            root = Root.apply(gradients, *outputs) if training else outputs[0]
            self._made["activation", chunk, micro] = [tensor.detach() for tensor in outputs]
        if training:
            self._live[chunk, micro] = _Live(received, root, gradients)

    def _backward(self, action: Action) -> None:
        gradients = self.parameters.gradients if self.parameters is not None and action.reduce else None
        match action.kind:
            case Kind.BACKWARD:
                if gradients is not None:
                    gradients.expect(action.chunk)
                self._go_back(action)
            case Kind.BACKWARD_INPUT:
                assert self.store is not None
                # dgrad only: matmuls leave the wgrad of their weights in the store
                with self.store.open(_key(action)):
                    self._go_back(action)
            case Kind.BACKWARD_WEIGHT:
                assert self.store is not None
                if gradients is not None:
                    gradients.expect(action.chunk, self.store.parameters(_key(action)))
                self.store.flush(_key(action))
        if gradients is not None:
            gradients.reduce(action.chunk)

    def _go_back(self, action: Action) -> None:
        chunk, micro = _key(action)
        live = self._live.pop((chunk, micro))
        if not self.parts[chunk].last:
            live.gradients += self._take("gradient", chunk, chunk + 1, micro)
        if live.root.requires_grad:  # False if all of it is frozen
            # the root hands the received gradients to all outputs of the chunk at once
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
        with self._as_stage_error(action):
            self._leaving.append((action, self.channels.send(kind, tensors, action.peer)))

    def _receive(self, action: Action, batches: Sequence[Any]) -> None:
        kind, (chunk, micro) = CONTENTS[action.kind], _key(action)
        assert self.channels is not None
        assert action.peer is not None
        maker = chunk - 1 if action.kind is Kind.RECV_ACTIVATION else chunk
        shapes = self.model.output_shapes(maker, batches[micro], self.region)
        with self._as_stage_error(action):
            self._arriving[kind, chunk, micro] = action, self.channels.receive(kind, shapes, self.dtype, action.peer)

    def _wait(self, action: Action, transfer: Transfer) -> Sequence[Tensor]:
        with self._as_stage_error(action), self.recorder.span(action):
            return transfer.wait()

    @contextmanager
    def _as_stage_error(self, action: Action) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StageError(
                f"{self.name}: {action}: the peer did not respond within parallel.timeout_s, or it "
                f"exited; look for the cause in the error of that stage ({error})"
            ) from error


def _key(action: Action) -> Key:
    assert action.micro is not None
    return action.chunk, action.micro
