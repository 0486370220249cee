"""Summary of a run in numbers, without starting it."""

from __future__ import annotations

from pangu.config.schema import RunConfig
from pangu.config.stages import describe_stages, num_samples
from pangu.layers.sparse import in_words
from pangu.metrics.text import quantity, size
from pangu.models.size import num_parameters, training_flops_per_token
from pangu.topology.layout import Layout
from pangu.zero.states import StatePlan


def describe(config: RunConfig, layout: Layout, largest: StatePlan | None) -> str:
    """Return a few lines about model, layout, largest model states, batch and length of a run.

    `largest` is None if a dry run follows, which prints that line itself, as it counts all tensors.
    """
    model, batch = config.model, config.batch
    matmul = config.precision.matmul
    parameters, tokens = f"{num_parameters(model):,} parameters", batch.global_size * model.sequence
    all_tokens = num_samples(config, config.train.steps) * model.sequence
    if model.experts is not None:
        parameters += f", {num_parameters(model, active=True):,} of them active per token"
    at_most = "at most " * (batch.global_size % (batch.micro_size * layout.data) > 0)
    shape = f"{quantity(model.layers, 'layer')}{' (query layer included)' if model.kind == 'pangu' else ''}"
    if model.mtp_layers:
        shape += f" and {model.mtp_layers} of multi-token prediction"
    shared = f" x context {layout.context}" if layout.context > 1 else ""
    unsplit = ", each unsplit" if layout.expert_tensor not in (0, layout.tensor) else ""
    experts = f", experts over {layout.expert} ranks{unsplit}" if layout.splits_experts else ""
    states = []
    if largest is not None:
        more = "plus activations and buffers, which dry_run=true counts"
        states = [("each device", f"model states of at most {largest.words()} ({more})")]
    rows = [
        ("model", f"{model.kind}, {shape}, hidden {model.hidden}, {quantity(model.heads, 'head')}: {parameters}"),
        (
            "layout",
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}{shared} = "
            f"{quantity(layout.world, 'device')}{experts}, ZeRO stage {layout.zero}"
            f"{', chosen by the planner' if config.parallel.auto else ''}",
        ),
        *states,
        (
            "step",
            f"{quantity(batch.global_size, 'sequence')} = {tokens:,} tokens; each replica computes "
            f"{at_most}{quantity(batch.accumulation(layout.data), 'micro-batch')} of {batch.micro_size}",
        ),
        (
            "run",
            f"{quantity(config.train.steps, 'step')} = {all_tokens:,} tokens, "
            f"{all_tokens * training_flops_per_token(model):.3g} model FLOPs",
        ),
        *_copies(config, layout.world),
        *([("stages", "; ".join(describe_stages(config)))] if batch.stages else []),
        (
            "numbers",
            f"{config.precision.compute}{f', matmuls of layers in {matmul}' * (matmul != 'compute')}, "
            f"{config.optimizer.name} with {_kept_in(config, config.optimizer.moments)} "
            f"moments, gradients reduced in {_kept_in(config, config.precision.reduce)}, recompute "
            f"{config.memory.recompute}",
        ),
    ]
    if model.sparse is not None:
        rows.append(("attention", in_words(model.sparse, model.sequence)))
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def _copies(config: RunConfig, world: int) -> list[tuple[str, str]]:
    """Return the row about copies in memory: weights and two moments, of a node's own ranks and of another's."""
    every, itemsize = config.checkpoint.memory_every, 8 if config.precision.compute == "fp64" else 4
    if not every:
        return []
    nbytes = 3 * itemsize * num_parameters(config.model) // world
    # two generations and one that is being written
    words = f"on average {size(nbytes)} per rank for its buddy; up to {size(6 * nbytes)} of host memory per rank"
    return [("copies", f"every {every} steps, {words}, besides {size(nbytes)} to copy from")]


def advise_less_memory(config: RunConfig) -> str:
    """Return keys that let a run do with less memory, for the message of one that ran out of it."""
    micro, recompute = config.batch.micro_size, config.memory.recompute
    ways = [f"batch.micro_size={part}" for part in range(micro - 1, 0, -1) if micro % part == 0][:1]
    if recompute != "full":
        ways.append("memory.recompute=" + ("selective, then full" if recompute == "none" else "full"))
    less = " or ".join(ways) or "a higher parallel.zero, memory.offload or more devices"
    return f"try {less}; dry_run=true in the same command counts the memory without a run"


def _kept_in(config: RunConfig, format_: str) -> str:
    """Return the effective format of moments or sums: in fp64 runs, fp32 means fp64."""
    return "fp64" if config.precision.compute == "fp64" and format_ == "fp32" else format_
