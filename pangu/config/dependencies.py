"""Keys that need some values of another one, as data."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pangu.common.errors import Problem, shown
from pangu.config.build import findings
from pangu.config.schema import LossConfig

_RELATIONS = {"=": operator.eq, "!=": operator.ne, ">": operator.gt}


class Dependency(NamedTuple):
    """Key that needs another one to be in some relation to a value."""

    key: str
    unused: Any
    """Value of the key that needs nothing."""
    other: str
    relation: Literal["=", "!=", ">"]
    operand: Any
    fix: str = ""
    """Setting that the key works with, if it is not one of the other key."""
    reason: str = ""
    """Reason of the need, where it is not obvious."""


MODEL = (
    *(Dependency(f"model.{key}", None, "model.positions", "=", "rope") for key in ("rope_base", "rope_scaling")),
    Dependency("model.nope_layers", None, "model.positions", "=", "rope"),
    Dependency("model.partial_rotary_factor", 1, "model.positions", "=", "rope"),
    Dependency("model.relative_buckets", None, "model.positions", "=", "relative"),
    Dependency("model.relative_distance", None, "model.positions", "=", "relative"),
    Dependency("model.positions", "rope", "model.latent", "=", None),
    Dependency("model.kind", "gpt", "model.latent", "=", None),
    Dependency("model.qk_norm", False, "model.latent", "=", None),
    Dependency("model.partial_rotary_factor", 1, "model.latent", "=", None),
    *(Dependency(f"model.{key}", None, "model.latent", "=", None) for key in ("head_dim", "kv_heads", "nope_layers")),
    Dependency("model.rope_scaling.mscale_all_dim", 0, "model.latent", "!=", None),
    Dependency("model.full_layers", None, "model.window", "!=", None),
    Dependency("model.parallel_block", False, "model.kind", "=", "gpt"),
    Dependency("model.parallel_block", False, "model.norm_placement", "=", "pre"),
    Dependency("model.final_norm", "before_query", "model.kind", "=", "pangu", "", "GPT has no query layer"),
    Dependency("model.router.groups", 1, "model.router.selection", "!=", "top", "model.router.selection=each_group"),
    Dependency("model.router.balance_sequences", 1, "model.router.balance", "=", "sequence"),
)
LAYOUT = (
    Dependency("parallel.sequence", False, "parallel.tensor", ">", 1),
    Dependency("parallel.context_kind", "auto", "parallel.context", ">", 1),
    Dependency("parallel.context_ulysses", 1, "parallel.context_kind", "=", "ring"),
    Dependency("parallel.zero_group", None, "parallel.zero", ">", 0, "parallel.zero=1", "ZeRO 0 shards nothing"),
    Dependency("parallel.expert", 1, "model.experts", "!=", None),
    Dependency("parallel.expert_tensor", None, "model.experts", "!=", None),
    Dependency("parallel.fixed_exchange", False, "model.experts", "!=", None),
    Dependency("parallel.expert_imbalance", 1.0, "model.experts", "!=", None),
    Dependency("parallel.two_batch_overlap", False, "parallel.expert", ">", 1, "", "no tokens are sent"),
    Dependency("parallel.two_batch_overlap", False, "batch.micro_size", ">", 1, "", "it splits micro-batches"),
    Dependency("parallel.two_batch_overlap", False, "model.norm_placement", "!=", "post"),
    Dependency("parallel.two_batch_overlap", False, "model.parallel_block", "=", False),
    Dependency("parallel.two_batch_overlap", False, "compile", "=", False),
)
RECIPE = (
    Dependency("precision.fp32_matmul", "auto", "precision.compute", "=", "fp32", "precision=fp32"),
    Dependency("precision.matmul", "compute", "precision.compute", "!=", "fp16", "precision=fp8", "scales conflict"),
    Dependency("precision.reduce", "fp32", "precision.compute", "!=", "fp64", "precision=fp32", "too coarse"),
    Dependency("optimizer.moments", "fp32", "precision.compute", "!=", "fp64", "precision=fp32", "too coarse"),
    Dependency("precision.loss_scale.consecutive", False, "precision.loss_scale.hysteresis", ">", 1),
    Dependency("optimizer.qk_clip", None, "model.qk_norm", "=", False, "", "norms already bound the logits"),
    Dependency("metrics.trust_ratios", False, "optimizer.name", "=", "lamb", "optimizer=lamb"),
    Dependency("loss.mtp_weight", LossConfig.mtp_weight, "model.mtp_layers", ">", 0, "model.mtp_layers=1"),
    Dependency("lr_schedule.decay_shape", "linear", "lr_schedule.shape", "=", "wsd", "lr_schedule=wsd"),
    Dependency("lr_schedule.min_lr", 0, "lr_schedule.shape", "!=", "constant", "lr_schedule=cosine"),
    Dependency("lr_schedule.decay_steps", None, "lr_schedule.shape", "!=", "constant", "lr_schedule=cosine"),
    Dependency("lr_schedule.decay_steps", None, "lr_schedule.shape", "!=", "inverse_sqrt", "lr_schedule=cosine"),
    Dependency("data.holdout", 0, "data.validation", "=", ()),
    Dependency("checkpoint.upcycle", False, "checkpoint.init_from", "!=", None, "checkpoint.init_from=CHECKPOINT"),
    Dependency("checkpoint.upcycle", False, "model.experts", "!=", None),
    Dependency("train.stop_after", None, "checkpoint.every", ">", 0, "checkpoint.every=100", "nothing to resume"),
    Dependency("faults.recheck", 0, "train.deterministic", "=", True, "", "it compares bits"),
    Dependency("faults.stragglers", "name", "faults.straggler_every", ">", 0, "faults.straggler_every=100"),
    Dependency("faults.stragglers", "name", "checkpoint.every", ">", 0, "checkpoint.every=100", "it saves first"),
)


def unmet(config: object, dependencies: Sequence[Dependency]) -> list[Problem]:
    """Return a problem for each key of a configuration, or of a part of one, that lacks what it needs."""
    return [problem for one in dependencies for problem in findings(_problem, one, config)]


def _problem(one: Dependency, config: object) -> Iterator[Problem]:
    try:
        value, other = operator.attrgetter(one.key, one.other)(config)
    except AttributeError:  # a key may not exist, e.g. with another optimizer
        return
    if value == one.unused or _RELATIONS[one.relation](other, one.operand):
        return
    needed, found = shown(one.operand), shown(other)
    ways = {"=": f"set {one.other}={needed}", ">": f"a larger {one.other}", "!=": f"set {one.other}"}
    fix = f"use {shown(one.unused)}, or {f'set {one.fix}' if one.fix else ways[one.relation]}"
    rule = f"needs {one.other} {one.relation} {needed}, got {found}{one.reason and f': {one.reason}'}"
    yield Problem(one.key, getattr(value, "name", value), rule, fix)
