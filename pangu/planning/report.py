"""What a configuration asks for, in numbers, without starting it."""

from __future__ import annotations

from dataclasses import dataclass

from pangu.config.optimizer import PrecisionConfig
from pangu.config.schema import RunConfig
from pangu.models.size import num_parameters, training_flops_per_token
from pangu.topology.layout import Layout


@dataclass(frozen=True)
class ModelStates:
    """Bytes per parameter that a device holds between steps (Rajbhandari et al. 2020, section 3)."""

    weights: float
    gradients: float
    optimizer: float
    """Master weights (where the weights are not them) and two moments."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def model_states(precision: PrecisionConfig, layout: Layout) -> ModelStates:
    """Weights in the compute format, fp32 gradients and moments, and fp32 master weights beside 16-bit ones; each
    divided by the replicas from its ZeRO stage on."""
    wide = 8 if precision.compute == "fp64" else 4
    narrow = precision.compute in ("bf16", "fp16")
    shard = [layout.data if layout.zero >= stage else 1 for stage in (1, 2, 3)]
    return ModelStates(
        weights=(2 if narrow else wide) / shard[2],
        gradients=wide / shard[1],
        optimizer=(2 * wide + (wide if narrow else 0)) / shard[0],
    )


def size(count: float) -> str:
    """Bytes for people: `23.84 GiB`, MiB below a tenth of one, KiB below a tenth of that."""
    if count >= 0.1 * 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 0.1 * 2**20 else f"{count / 2**10:.1f} KiB"


def describe(config: RunConfig, layout: Layout) -> str:
    """The configuration in a few lines: model, layout, model states of a device, batch and length of the run."""
    model, batch = config.model, config.batch
    parameters = num_parameters(model)
    states = model_states(config.precision, layout)
    share = parameters / layout.model
    tokens = batch.global_size * model.sequence
    accumulation = batch.global_size // (batch.micro_size * layout.data)
    shape = f"{model.layers} layers{' (query layer included)' if model.kind == 'pangu' else ''}"
    rows = [
        ("model", f"{model.kind}, {shape}, hidden {model.hidden}, {model.heads} heads: {parameters:,} parameters"),
        (
            "layout",
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} = {layout.world} devices, "
            f"ZeRO stage {layout.zero}",
        ),
        (
            "each device",
            f"{size(share * states.total)} of model states: weights {size(share * states.weights)}, gradients "
            f"{size(share * states.gradients)}, optimizer {size(share * states.optimizer)} (parameters evenly spread; "
            "activations and buffers come on top)",
        ),
        (
            "step",
            f"{batch.global_size} sequences = {tokens:,} tokens; each replica computes {accumulation} "
            f"micro-batch{'es' if accumulation > 1 else ''} of {batch.micro_size}",
        ),
        (
            "run",
            f"{config.train.steps:,} steps = {config.train.steps * tokens:,} tokens, "
            f"{config.train.steps * tokens * training_flops_per_token(model):.3g} model FLOPs",
        ),
        (
            "numbers",
            f"{config.precision.compute}, {config.optimizer.name} with {config.optimizer.moments} moments, gradients "
            f"reduced in {config.precision.reduce}, recompute {config.memory.recompute}",
        ),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)
