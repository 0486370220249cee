"""Contradictions between the layout over devices, the model, the batch and the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pangu.common.errors import Problem, shown
from pangu.config import dependencies
from pangu.config.build import findings
from pangu.config.dependencies import unmet
from pangu.config.model import ModelConfig
from pangu.config.parallelism import balance_problems, context_problems, expert_problems, least_data
from pangu.config.schema import RunConfig
from pangu.config.stages import in_stage
from pangu.config.suggest import any_of, divisors_near, either, multiples_near

FP8_MULTIPLES = {"fp8": 16, "fp8_blockwise": 128, "mxfp8": 32}
"""Divisor of all matmul dimensions of a rank by `precision.matmul`."""
MOST_FORWARDS = 2**15
"""Largest number of forward passes in a step's schedule, over all stages; GPT-3 with 12 stages on one replica has
18,432."""


def asks_for_layout(values: Mapping[str, Any]) -> bool:
    """Return whether the planner is to choose the layout of a composed configuration, not checked yet."""
    parallel = values.get("parallel")
    return isinstance(parallel, Mapping) and parallel.get("auto") is True


def layout_problems(config: RunConfig, world: int, uneven: bool = False) -> list[Problem]:
    """Return all problems of a layout on a number of processes; if `uneven`, not all replicas need as many samples."""
    rules = (_tensor, _shared_sequence, context_problems, _pipeline, _zero, _fp8)
    problems = unmet(config, dependencies.LAYOUT) + [problem for rule in rules for problem in findings(rule, config)]
    problems += findings(_devices, config, world)
    problems = problems or findings(_batch, config, world, uneven) + findings(_experts, config, world)
    return problems or findings(_stages, config, world, uneven)


def _stages(config: RunConfig, world: int, uneven: bool) -> Iterator[Problem]:
    for number in range(len(config.batch.stages)):
        stage_config = in_stage(config, number)
        stage_config = replace(stage_config, batch=replace(stage_config.batch, stages=()))
        for one in layout_problems(stage_config, world, uneven):
            yield replace(one, key=f"batch.stages[{number}]: {one.key}")


def data_size(config: RunConfig, world: int) -> int:
    """Return `parallel.data`, or the size that `world` leaves for it; in a dry run at least what the experts need."""
    parallel, least = config.parallel, 1
    if config.dry_run and parallel.expert > 1:
        least = least_data(parallel.expert, parallel.expert_tensor, parallel.tensor, parallel.context)
    return parallel.data or max(least, world // one_copy(config))


def one_copy(config: RunConfig) -> int:
    """Return the number of devices that hold one copy of the model and split its sequences."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def _tensor(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    yield from shared_matrices(config.model, parallel.tensor, parallel.sequence, parallel.expert_tensor != 1)


def shared_matrices(model: ModelConfig, tensor: int, sequence: bool = False, experts: bool = True) -> Iterator[Problem]:
    """Yield why `tensor` devices cannot split a model's matrices, and with `sequence` the activations between them."""
    cut = {"model.heads = ": model.heads}
    if len(model.expert_layers) < model.num_blocks:
        cut["the feed-forward width "] = model.ffn_size
    if experts and model.experts is not None:
        cut["an expert's width "] = model.expert_size
    if sequence:
        cut["model.sequence = "] = model.sequence
    wrong = [f"{name}{size}" for name, size in cut.items() if size % tensor]
    if wrong or not model.splits_heads(tensor):
        near = divisors_near(math.gcd(*cut.values()), tensor, model.splits_heads)
        if sequence and len(near) > 1 and near[0] == 1:
            del near[0]  # a single device has no sequence to share
        fix = "use 1 with parallel.sequence=false" if sequence and near == [1] else any_of(near)
        pieces = f"model.kv_heads = {model.kv_heads}, or be a multiple of it that cuts model.head_dim evenly"
        rule = f"must divide {' and '.join(wrong)}" if wrong else f"must divide {pieces}"
        yield Problem("parallel.tensor", tensor, rule, fix)


def shares_keys(config: RunConfig) -> bool:
    """Return whether tensor-parallel ranks exchange keys that they share, which no graph contains."""
    model, tensor = config.model, config.parallel.tensor
    return tensor > 1 if model.latent is not None else model.ranks_per_key_head(tensor) > 1


def _shared_sequence(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.tensor == parallel.expert == 1 and parallel.overlap_chunks > 1:
        rule = "has no communication to overlap with parallel.tensor = 1"
        larger = "parallel.tensor" if config.model.experts is None else "parallel.tensor or parallel.expert"
        yield Problem("parallel.overlap_chunks", parallel.overlap_chunks, rule, f"use 1, or a larger {larger}")


def _pipeline(config: RunConfig) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.layers
    chunks = parallel.pipeline * parallel.virtual_stages
    key = "parallel.pipeline" if parallel.virtual_stages == 1 else "parallel.pipeline x parallel.virtual_stages"
    if chunks > layers:
        yield Problem(key, chunks, f"each chunk needs at least one of model.layers = {layers}", f"use 1 to {layers}")
    if "activations" in config.memory.offload and layers <= chunks:
        rule = f"the last layer of a chunk is not offloaded, and no chunk of model.layers = {layers} has two"
        yield Problem("memory.offload", "[activations]", rule, f"use [], or a smaller {key}")


def _zero(config: RunConfig) -> Iterator[Problem]:
    parallel, once = config.parallel, list(dict.fromkeys(config.memory.offload))
    if len(once) < len(config.memory.offload):
        yield Problem("memory.offload", list(config.memory.offload), "has duplicate entries", f"use {shown(once)}")
    if "parameters" in config.memory.offload and parallel.zero != 3:
        rule = f"parallel.zero = {parallel.zero} keeps all parameters on the device"
        yield Problem("memory.offload", "[parameters]", rule, "use [optimizer], or set parallel.zero=3")


def _fp8(config: RunConfig) -> Iterator[Problem]:
    """Yield the problem of matmul sizes that no fp8 kernel supports, or whose blocks would lie on several ranks."""
    matmul, model = config.precision.matmul, config.model
    ranks, context = config.parallel.tensor, config.parallel.context
    # tensors of fp8 have one scale: fp64, where fp8 is emulated, takes any size
    if matmul == "compute" or (matmul == "fp8" and config.precision.compute == "fp64"):
        return
    multiple = FP8_MULTIPLES[matmul]
    share = "" if ranks == 1 else f" on each of parallel.tensor = {ranks} ranks"
    length, shared = model.sequence // context, "" if context == 1 else f" / parallel.context = {context}"
    half = "half of " * config.parallel.two_batch_overlap
    tokens = {f"{half}batch.micro_size x model.sequence{shared}": math.gcd(*config.rows_at_once) * length}
    key_value = 2 * model.kv_size // ranks
    if matmul != "fp8":  # a rank may have a chunk from each end of the sequence
        tokens = {f"model.sequence{shared and f' / (2 x parallel.context = {context})'}": length // min(context, 2)}
        key_value //= 2
    widths = {f"the queries' width{share}": model.query_size // ranks}
    if model.latent is None:
        widths[f"the keys' and values' width{share}"] = key_value
    else:
        values = model.values_size // ranks
        widths[f"the keys' and values' width{share}"] = model.latent.nope_head_dim * model.heads // ranks + values
        widths |= {f"the values' width{share}": values, "model.latent.kv_rank": model.latent.kv_rank}
        widths["model.latent.q_rank"] = model.latent.q_rank or 0
    sizes = {
        "model.hidden": model.hidden,
        **widths,
        f"the feed-forward width{share}": model.ffn_size // ranks if len(model.expert_layers) < model.num_blocks else 0,
        f"the shared experts' width{share}": model.shared_experts * model.expert_size // ranks,
        **tokens,
    }
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % multiple]:
        rule = f"needs multiples of {multiple}: {', '.join(wrong)}"
        yield Problem("precision.matmul", matmul, rule, "set precision=bf16")


def _devices(config: RunConfig, world: int) -> Iterator[Problem]:
    parallel = config.parallel
    if config.dry_run:
        return
    one_model = one_copy(config)
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline}
    sizes |= {"context": parallel.context} if parallel.context > 1 else {}
    sizes |= {"data": parallel.data} if parallel.data else {}
    keys, values = ", ".join(f"parallel.{name}" for name in sizes), ", ".join(map(str, sizes.values()))
    least = one_model * (parallel.data or 1)
    fits_here = f"set parallel.data={world // one_model} or " * bool(parallel.data and world % one_model == 0)
    if world < least:
        yield Problem(
            keys,
            values,
            f"needs {'' if parallel.data else 'at least '}{least} processes, one per device, got {world}",
            f"{fits_here}start {least} processes (torchrun --nproc-per-node and --nnodes), check the layout on this "
            "machine with dry_run=true, or use a smaller preset such as +config=quickstart",
        )
    elif world % one_model or (parallel.data and world != least):
        rule = f"needs {'a multiple of ' if not parallel.data else ''}{least} processes, got {world}"
        number = least if parallel.data else either(multiples_near(one_model, world))
        yield Problem(keys, values, rule, f"{fits_here}start {number} processes")


def _batch(config: RunConfig, world: int, uneven: bool) -> Iterator[Problem]:
    batch, group, data = config.batch, config.parallel.zero_group, data_size(config, world)
    replicas = data * config.parallel.context
    if group is not None and replicas % group:
        near = any_of(divisors_near(replicas, group))
        shared = f" x parallel.context = {replicas}" if replicas > data else ""
        yield Problem("parallel.zero_group", group, f"must divide the data-parallel size {data}{shared}", near)
    unit = batch.micro_size * data

    def divides(micro: int) -> bool:
        return batch.global_size % (micro if uneven else micro * data) == 0 and batch.global_size >= micro * data

    if not divides(batch.micro_size):
        rule = "must be a multiple of batch.micro_size, and at least" if uneven else "must be a multiple of"
        rule += f" batch.micro_size x data-parallel size = {batch.micro_size} x {data} = {unit}"
        sizes = multiples_near(batch.micro_size if uneven else unit, batch.global_size)
        fix = any_of([size for size in sizes if size >= unit] or [unit])
        if micro := divisors_near(batch.global_size, batch.micro_size, divides):
            fix += f"; or set batch.micro_size to {either(micro)}"
        yield Problem("batch.global_size", batch.global_size, rule, fix)
    chunks, accumulation = config.parallel.pipeline * config.parallel.virtual_stages, batch.accumulation(data)
    if accumulation * chunks > MOST_FORWARDS:
        through = f" through {chunks} chunks of layers" if chunks > 1 else ""
        rule = f"makes {accumulation:,} micro-batches{through} in a step, more than {MOST_FORWARDS // chunks:,}"
        fix = f"use {MOST_FORWARDS // chunks * unit}, or a larger batch.micro_size"
        yield Problem("batch.global_size", batch.global_size, rule, fix)


def _experts(config: RunConfig, world: int) -> Iterator[Problem]:
    replicas = data_size(config, world) * config.parallel.context
    yield from list(expert_problems(config, replicas)) or balance_problems(config)
