"""Times of training steps on a host, to which the costs of operators and of a step are fitted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pangu.calibration.clock import Clock
from pangu.config.build import build
from pangu.config.cluster import ClusterConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.planning.cost import step_time
from pangu.planning.program import Plan, Program
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import choose
from pangu.training.step import Trainer

_STEPS = ((128, 1, 4), (128, 4, 1), (512, 1, 2), (512, 4, 1), (512, 1, 1), (128, 1, 1))
"""Steps that are timed: hidden size, sequences of a micro-batch, micro-batches."""
_TEXT = np.arange(4 * 129).reshape(4, 129)
"""int64 [sequences, length + 1]."""


def measure_steps(clock: Clock, cluster: ClusterConfig, configs: Path) -> ClusterConfig:
    """Return the cluster with figures of a host from steps of the trainer on one process.

    These are the seconds to start a kernel, the bytes per second of those that are no matmuls, and the rest of a step:
    least squares on relative errors, as no queue keeps a host's kernels apart. configs: folder of the configurations.
    """
    units = [{"launch_us": 1.0}, {"gb_s": 1.0}, {"step_us": 1.0}]
    runs = {step: _configuration(configs, *step) for step in _STEPS}
    samples = {step: clock.computing(_step(config, clock.device)) for step, config in runs.items()}
    rows, rest = [], []
    for (_, size, number), taken in clock.in_turns(samples).items():
        config = runs[_, size, number]
        plan = Plan(1, 1, 1, 1, 1, 0, False, "none", size, number, "1f1b", layers=(config.model.layers,))
        ledger = Program(config).describe(plan)
        without, *terms = (step_time(ledger, plan, _with(cluster, **one)).total for one in [{}, *units])
        rows.append([(term - without) / taken for term in terms])
        rest.append(1 - without / taken)
    table, wanted = np.array(rows), np.array(rest)
    launch_us, s_per_gb, step_us = map(float, _least_squares(table, wanted))
    return _with(cluster, launch_us, 1 / max(1e-6, s_per_gb), step_us)


def _step(config: RunConfig, device: torch.device) -> Callable[[], object]:
    """Return a step of the trainer on one process."""
    mesh, rows = Mesh.connect(Layout(), device), config.batch.micro_size
    trainer = Trainer(config, mesh, choices=choose(config, mesh))
    batch = make_batch(_TEXT[:rows], range(rows), config.data.packing)
    return lambda: trainer.train_step([batch] * config.batch.accumulation(1))


def _least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least-squares solution without negative numbers: the best of those in which some are zero."""
    best, error = np.zeros(table.shape[1]), np.inf
    for columns in itertools.product((False, True), repeat=table.shape[1]):
        solution = np.zeros(table.shape[1])
        solution[list(columns)] = np.linalg.lstsq(table[:, columns], wanted, rcond=None)[0]
        off = float(np.sum((table @ solution - wanted) ** 2))
        if (solution >= 0).all() and off < error:
            best, error = solution, off
    return best


def _with(cluster: ClusterConfig, launch_us: float = 0.0, gb_s: float = 1e12, step_us: float = 0.0) -> ClusterConfig:
    memory = replace(cluster.memory, gb_s=gb_s, efficiency=1.0)
    return replace(cluster, memory=memory, launch_us=launch_us, step_us=step_us, queued=False)


def _configuration(configs: Path, hidden: int, size: int, number: int) -> RunConfig:
    """Return the configuration of a small model and `number` micro-batches of a size."""
    from hydra import compose, initialize_config_dir  # noqa: PLC0415 - optional package
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional package

    with initialize_config_dir(str(configs), version_base="1.3"):
        model = {"layers": 2, "hidden": hidden, "heads": hidden // 64, "sequence": _TEXT.shape[1] - 1, "vocab": 1024}
        fixed = [f"model.{key}={value}" for key, value in {**model, "dropout": 0, "attention_dropout": 0}.items()]
        fixed += ["model=gpt2_124m", "model.attention=sdpa", "data=synthetic", "precision=fp32"]
        composed = compose("base", [*fixed, f"batch.micro_size={size}", f"batch.global_size={size * number}"])
    return build(RunConfig, OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
