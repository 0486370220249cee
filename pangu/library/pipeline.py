"""Pipeline of a user's own modules, run by any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pangu.collectives.agreement import agree
from pangu.common.errors import UserError
from pangu.layers.linear import ParallelLinear
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.library.sharded_model import ShardedModel
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Runner
from pangu.pipeline.stages import shards_sums
from pangu.schedule.orders import NumbersError
from pangu.schedule.schedule import Schedule, forward_only, make_schedule
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank

Made = tuple[list[tuple[int, ...]], torch.dtype]
"""Shapes and dtype of a chunk's output."""


class DeferredLinear(nn.Linear):
    """Linear layer whose weight gradient a schedule may compute later than its input gradient."""

    store: WeightGradientStore

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] for x [..., inputs]."""
        rows = x if x.dim() > 1 else x[None]
        # what makes a weight of others, as `weight_norm` does, has its backward in that of the input
        leaves = self.weight.is_leaf and (self.bias is None or self.bias.is_leaf)
        y = column_parallel_matmul(rows, self.weight, self.bias, ALONE, self.store if leaves else None)
        return y if x.dim() > 1 else y[0]


class _StageOutput(tuple[Tensor, ...]):
    """Tensors that a chunk passes to the next."""

    __slots__ = ()

    @property
    def hidden(self) -> Any:
        return self[0] if len(self) == 1 else tuple(self)


class _Chunks:
    """Chunks of this rank, in the form that a runner needs."""

    def __init__(self, modules: nn.ModuleDict, made: dict[int, Made]) -> None:
        self._modules, self.made = modules, made

    def __call__(self, part: ModelPart, received: Any, batch: Any, keys: Any = None, cache: Any = None) -> _StageOutput:
        chunk = part.layers.start
        output = self._modules[str(chunk)](batch[0] if received is None else received.hidden)
        return _StageOutput(output if isinstance(output, (list, tuple)) else (output,))

    def from_message(self, tensors: Sequence[Tensor]) -> _StageOutput:
        return _StageOutput(tensors)

    def output_shapes(self, chunk: int, batch: Any, region: TensorRank) -> list[tuple[int, ...]]:
        return self.made[chunk][0]


class Pipeline:
    """Pipeline of a model's chunks on the stages of a mesh, with the schedule that runs them.

    Schedules: `gpipe`, `1f1b`, `interleaved` and `breadth_first` (several chunks per stage), and the zero-bubble
    schedules `zb_h1` and `zb_v` (two chunks per stage; Qi et al. 2024, arXiv 2401.10241), whose backward is split: the
    weight gradients of every `nn.Linear` and parallel layer wait for a gap. Those of other modules (convolutions,
    norms, `nn.MultiheadAttention`'s matrices, linear layers with `weight_norm`) are computed with the input gradient,
    which makes that part longer and the gaps less well filled, with the same results.
    """

    def __init__(
        self,
        chunks: Sequence[Callable[[], nn.Module]],
        mesh: Mesh,
        micro_batches: int,
        schedule: str = "1f1b",
        *,
        regions: Mapping[int, Sequence[str]] | None = None,
        **storage: Any,
    ) -> None:
        """Create this rank's chunks and shard them over its replicas; raise UserError as `shard`, or for wrong numbers.

        Args:
            chunks: Functions that create the chunks, in model order, a multiple of `mesh.layout.pipeline`; each is
                called on its chunk's stage. A chunk takes the output of the previous one: a tensor or a tuple of
                tensors, all of one floating-point dtype. Chunks share no parameters.
            mesh: Mesh of `connect`.
            micro_batches: Micro-batches per replica and step.
            schedule: One of the names above.
            regions: `regions` of `shard` by chunk index, if not the default ones.
            storage: `dtype`, `bucket_mib`, `offload`, `overlap` and `message` of `shard`.
        """
        stages, stage = mesh.layout.pipeline, mesh.at.pipeline
        virtual_stages, rest = divmod(len(chunks), stages)
        if rest or not virtual_stages:
            raise UserError(f"{len(chunks)} chunks: must be a multiple of the {stages} stages")
        if any(isinstance(chunk, nn.Module) for chunk in chunks):
            raise UserError("chunks: must be functions that return modules, not modules; use e.g. `lambda: Stage()`")
        try:
            self.schedule = make_schedule(schedule, stages, virtual_stages, micro_batches, shards_sums(mesh.layout))
        except NumbersError as error:
            raise UserError(str(error)) from error
        if unknown := sorted(set(regions or {}) - set(range(len(chunks)))):
            raise UserError(f"regions: unknown chunk {unknown[0]}; use 0 to {len(chunks) - 1}")
        local = [chunk for chunk, at in enumerate(self.schedule.stage_of) if at == stage]
        self.modules = nn.ModuleDict({str(chunk): chunks[chunk]() for chunk in local})
        """Chunks of this rank, by index."""
        self._mesh, self._last = mesh, len(chunks) - 1
        self._known: dict[str, dict[int, Made]] = {}
        store = WeightGradientStore() if self.schedule.splits_backward else None
        if store is not None:
            _defer(self.modules, store)
        self.sharded = ShardedModel(
            self.modules,
            mesh,
            {chunk: str(chunk) for chunk in local},
            regions,
            reduces=self.schedule.reduce_each,
            turns=self._last in local,
            **storage,
        )
        """Sharded model with `lamb`, `adamw` and `step`, and the argument of `save` and `load`; names of parameters
        begin with their chunk's index."""
        parts = {c: ModelPart(range(c, c + 1), first=c == 0, last=c == self._last) for c in local}
        self._chunks = _Chunks(self.modules, {})
        self._runner = Runner.on(
            mesh, self._chunks, parts, self.schedule, torch.float32, store=store, parameters=self.sharded.parameters
        )

    def forward_backward(
        self, inputs: Sequence[Any], targets: Sequence[Any], loss: Callable[[Any, Any], Tensor]
    ) -> Tensor | None:
        """Run forward and backward of a step; `self.sharded.step` follows.

        Gradients are those of the mean of the losses of the micro-batches (and of the replicas).

        Args:
            inputs: Input of the first chunk per micro-batch, on the device; on every stage, for their shapes.
            targets: Target per micro-batch; used on the stage of the last chunk.
            loss: Function (output of the last chunk, target) -> scalar.

        Returns:
            The mean loss on the stage of the last chunk, None on others.

        Raises:
            UserError: The number of micro-batches is not the schedule's, or an output cannot be sent.
            StageError: Another stage is gone or hangs.
        """
        results = self._run(self.schedule, inputs, targets, lambda output, batch: loss(output, batch[1]), True)
        self.sharded.hooks.hide_gradients(True)
        return torch.stack(results).mean() if results else None

    @torch.no_grad()
    def forward(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the last chunk's outputs for some micro-batches, on its stage; an empty list on others."""
        outputs: list[Any] = []

        def end(output: Any, _: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        self._run(forward_only(self.schedule, len(inputs)), inputs, inputs, end, False)
        return outputs

    def _run(
        self, schedule: Schedule, inputs: Sequence[Any], targets: Sequence[Any], end: Callable[..., Tensor], train: bool
    ) -> list[Tensor]:
        if not len(inputs) == len(targets) == schedule.micro_batches:
            raise UserError(
                f"{len(inputs)} inputs, {len(targets)} targets: the schedule has {schedule.micro_batches} micro-batches"
            )
        kinds = {str(tree_map(_described, value)): value for value in inputs}
        if len(kinds) > 1:
            raise UserError(f"inputs of several shapes: {', '.join(kinds)}; all micro-batches need the same one")
        if self._last:
            ((kind, value),) = kinds.items()
            if kind not in self._known:
                self._known[kind] = self._infer_outputs(value)
            self._chunks.made = self._known[kind]
            self._runner.dtype = self._chunks.made[0][1]
        scale = torch.full((), 1.0 / schedule.micro_batches, dtype=torch.float64) if train else None
        try:
            return self._runner.run(schedule, list(zip(inputs, targets, strict=True)), end, scale=scale)
        except BaseException:
            self.sharded.hooks.failed |= train
            raise

    def _infer_outputs(self, value: Any) -> dict[int, Made]:
        """Return the output shapes of each chunk but the last for such an input, found by computing with zeros."""
        stages = self._mesh.layout.peers(self._mesh.rank, "pipeline")
        made: dict[int, Made] = {}
        for chunk in range(self._last):

            def infer(chunk: int = chunk) -> Made:
                given = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, value)
                if chunk:
                    shapes, dtype = made[chunk - 1]
                    given = _StageOutput(torch.zeros(s, dtype=dtype, device=self._mesh.device) for s in shapes).hidden
                return _run_chunk(chunk, self.modules[str(chunk)], given)

            answers = agree(self._mesh, infer, runs_here=str(chunk) in self.modules)
            made[chunk] = next(answer for rank in stages if (answer := answers[rank]) is not None)
        if len({dtype for _, dtype in made.values()}) > 1:
            listed = ", ".join(f"chunk {chunk} {dtype}" for chunk, (_, dtype) in made.items())
            raise UserError(f"chunks return tensors of several formats: {listed}; use a single one")
        return made


@torch.no_grad()
def _run_chunk(chunk: int, module: nn.Module, given: Any) -> Made:
    """Return the output shapes of a chunk, without a change of random numbers or buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng():
        output = module(given)
    for buffer, before in buffers:
        buffer.copy_(before)
    tensors = list(output) if isinstance(output, (list, tuple)) else [output]
    if not tensors or not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        what = ", ".join(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in tensors)
        raise UserError(f"chunk {chunk} returns {what or 'nothing'}; return a floating-point tensor or a tuple of them")
    if len(formats := {str(x.dtype) for x in tensors}) > 1:
        raise UserError(f"chunk {chunk} returns {', '.join(sorted(formats))}: use a single format")
    return [tuple(x.shape) for x in tensors], tensors[0].dtype


def _described(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__


def _defer(modules: nn.Module, store: WeightGradientStore) -> None:
    """Let linear layers compute weight gradients when the schedule says."""
    for module in modules.modules():
        if type(module) is nn.Linear:
            module.__class__ = DeferredLinear
        if isinstance(module, (DeferredLinear, ParallelLinear)):
            module.store = store
