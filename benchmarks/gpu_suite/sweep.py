"""Steps of the trainer in other configurations: sizes of micro-batches, recompute, offload, experts, LAMB, fp16,
dropout and deterministic kernels, each against the preset as `speed` measures it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.speed import measured, one_rank
from pangu.training.determinism import deterministic

BASE = ("pangu_350m", dict[str, Any]())
EXPERTS = {"model.experts": 8, "model.experts_per_token": 2, "model.expert_ffn": 2048}
LAMB = {
    **{"name": "lamb", "lr": 2e-3, "betas": [0.9, 0.999], "eps": 1e-6, "eps_inside_root": False, "weight_decay": 0.01},
    **{"exclude_vectors": True, "max_ratio": None, "moments": "fp32", "clip": 1.0},
}
"""Options of configs/optimizer/lamb.yaml."""
SCALE = {"initial": 65536.0, "growth_interval": 1000, "minimum": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "micro-batches of 1": ("pangu_350m", {"batch.micro_size": 1}),
    "micro-batches of 2": ("pangu_350m", {"batch.micro_size": 2}),
    "micro-batches of 4": ("pangu_350m", {"batch.micro_size": 4}),
    "micro-batches of 16": ("pangu_350m", {"batch.micro_size": 16}),
    "recompute": ("pangu_350m", {"memory.recompute": "full"}),
    "selective recompute": ("pangu_350m", {"memory.recompute": "selective"}),
    "activations offloaded": ("pangu_350m", {"memory.offload": ["activations"]}),
    "optimizer offloaded": ("pangu_350m", {"memory.offload": ["optimizer"]}),
    "experts": ("pangu_350m", EXPERTS),
    "LAMB": ("pangu_350m", {"optimizer": LAMB}),
    "fp16": ("pangu_350m", {"precision.compute": "fp16", "precision.loss_scale": SCALE}),
    "dropout": ("pangu_350m", {"model.dropout": 0.1, "model.attention_dropout": 0.1, "model.attention": "auto"}),
    "deterministic": ("pangu_350m", {"train.deterministic": True, "model.attention": "auto"}),
    "2.6B": ("pangu_2_6b", {}),
    "2.6B, micro-batches of 1": ("pangu_2_6b", {"batch.micro_size": 1}),
    "2.6B, activations offloaded": ("pangu_2_6b", {"memory.offload": ["activations"]}),
    "2.6B, recompute": ("pangu_2_6b", {"memory.recompute": "full"}),
}
"""Row -> preset and changes, with as many sequences in a step."""


def measure(setting: Setting) -> None:
    """A row for each case; a case that the device has no way to compute says why."""
    base = dict[str, float]()
    with one_rank(setting.device):
        for name, (preset, changes) in {"350M": BASE, **CASES}.items():
            with setting.row(name) as figures, deterministic() if name == "deterministic" else nullcontext():
                changes = {**changes, "batch.global_size": 16} if "batch.micro_size" in changes else changes
                figures |= measured(setting, "pangu", setting.values(preset, {"model.attention": "sdpa", **changes}))
                base.setdefault(preset, figures["step_seconds"])
                figures["against preset"] = figures["step_seconds"] / base[preset]
            setting.release()
