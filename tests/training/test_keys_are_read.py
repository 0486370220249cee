"""Every key does something: a few small runs together read each of them, outside the code that builds and checks."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import UserError
from pangu.config import data, model, optimizer, rope, schema, sparse
from pangu.config.build import keys_of
from pangu.config.schema import RunConfig
from pangu.data.stdlib import StdlibPaths
from pangu.prepare import corpora
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.pretrain import forecast, read_benchmarks
from pangu.topology.layout import Layout
from pangu.training.run import run
from tests.configs import composed
from tests.parallel.harness import small_trainer
from tests.spawn import free_port
from tests.threads import Ranks

SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.vocab=600",
    "model.sequence=16",
    "batch.global_size=2",
    "batch.micro_size=1",
    "train.steps=2",
    "train.device=cpu",
    "lr_schedule.warmup_steps=1",
    "validation.every=0",
)
MEMORY = ("memory.recompute=selective", "memory.offload=[activations]")
EXPERTS = ("model.layers=3", "model.experts=4", "model.expert_capacity=1", "model.shared_experts=1")
LIMITED = ("model.router.selection=group_limited", "model.router.groups=2", "model.router.groups_per_token=1")
HYSTERESIS = ("precision=fp16", "precision.loss_scale.hysteresis=2", "precision.loss_scale.consecutive=true")
ROLLBACK = (
    "train.steps=3",
    "checkpoint.every=2",
    "optimizer.lr=10",  # makes the loss rise, step by step
    "lr_schedule.warmup_steps=3",
    "faults.action=rollback",
    "model.positions=rope",
    "model.nope_layers=2",
    "model.rope_scaling={name:linear,factor:2}",
    "faults.spike=0.01",
    "faults.spike_window=2",
    "faults.max_rollbacks=1",
)
PASSED_ON = {
    # a tag chooses the class that is built
    "AdamConfig.name",
    "LambConfig.name",
    "MuonConfig.name",
    "StdlibData.kind",
    "IndexedData.kind",
    "StreamData.kind",
    "SyntheticData.kind",
    "Llama3Scaling.name",
    "LinearScaling.name",
    "YarnScaling.name",
    "InstructionsData.kind",
    # `check` returns the data-parallel size that the layout is made of
    "ParallelConfig.data",
    # plans and dry runs read it (tests/dryrun/test_modules.py)
    "ParallelConfig.expert_imbalance",
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """`Class.field` of every configuration field that is read, but for building, checking, copying and saving it."""
    seen: set[str] = set()
    bystanders = (
        "config/build.py",
        "config/checks.py",
        "config/dependencies.py",
        "config/layout_checks.py",
        "config/model_checks.py",
        "config/attention.py",
        "dataclasses.py",
        "copy.py",
    )

    def watch(cls: type) -> None:
        fields = {field.name for field in dataclasses.fields(cls)}

        def get(self: Any, name: str) -> Any:
            if name in fields and not sys._getframe(1).f_code.co_filename.endswith(bystanders):
                seen.add(f"{cls.__name__}.{name}")
            return object.__getattribute__(self, name)

        monkeypatch.setattr(cls, "__getattribute__", get)

    for cls in classes():
        watch(cls)
    return seen


def classes() -> set[type]:
    """Every class of the configuration."""
    values = [value for module in (schema, model, rope, sparse, data, optimizer) for value in vars(module).values()]
    return {value for value in values if isinstance(value, type) and dataclasses.is_dataclass(value)}


def all_fields() -> set[str]:
    """`Class.field` of every leaf of the schema."""
    leaves = {key.rsplit(".", 1)[-1] for key in keys_of(RunConfig)}
    fields = [(cls.__name__, field.name) for cls in classes() for field in dataclasses.fields(cls)]
    return {f"{cls}.{name}" for cls, name in fields if name in leaves}


def test_a_few_runs_read_every_key(reads: set[str], tmp_path: Path, prepared: StdlibPaths) -> None:
    with IndexedWriter(tmp_path / "corpus", 600) as writer:
        writer.add(list(range(10, 500)))
    scaling = "model.rope_scaling={factor:2,low_freq_factor:1,high_freq_factor:4,original_sequence:8}"
    rope = ("model.positions=rope", "model.rope_base=500", scaling)
    relative = (
        "model.positions=relative",
        "model.relative_buckets=8",
        "model.relative_distance=20",
        "model.window=7",
        "model.full_layers=2",
    )
    patterns = (
        "model.sparse={kind:fixed,block:4,local_blocks:2,global_blocks:1}",
        "model.sparse={kind:strided,block:4,local_blocks:1,stride:2}",
        "model.sparse={kind:bigbird,block:2,local_blocks:1,global_blocks:1,random_blocks:1,seed:1}",
    )
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text('{"text": "one two three"}\n', encoding="utf-8")
    texts = [json.dumps({"text": f"text of number {i}"}) for i in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join([*texts, "x"]), encoding="utf-8")
    evaluate = ("evaluate.every=1", "evaluate.tasks=[lambada]", f"evaluate.data={tmp_path}")
    quiet = ("metrics.wandb=off", "metrics.tensorboard=false")
    library = ("model.vocab=1024", f"data.folder={prepared.folder}")
    runs = [
        (
            *library,
            "validation.every=1",
            "sample.tokens=2",
            "sample.prompts=[x]",
            "metrics.wandb=offline",
            *evaluate,
            f"metrics.prometheus_port={free_port()}",
        ),
        (
            "data=indexed",
            f"data.train=[{tmp_path}/corpus]",
            "data.weights=[1]",
            "data.packing.method=best_fit",
            f"data.packing.index={tmp_path}",
            "data.packing.eod=9",
            "data.weight_schedule=[{sample:3,weights:[2]}]",
            "optimizer=lamb",
            *MEMORY,
            patterns[0],
            *EXPERTS,
            *LIMITED,
            "model.router.balance=bias",
            *rope,
            *quiet,
        ),
        (
            "data=stream",
            f"data.train=[{tmp_path}/text.jsonl]",
            "data.weights=[1]",
            "data.holdout=0.5",
            "data.tokenizer={kind: bytes}",
            "data.shuffle=9",
            "data.max_bad=1",
            "validation.every=1",
            "model.mtp_layers=1",
            "optimizer=muon",
            "optimizer.qk_clip=100",
            "lr_schedule=wsd",
            "batch.stages=[{until:1,sequence:8,global_size:2}]",
            "weight_decay_schedule={start:0,shape:linear}",
            "parameter_groups=[{names:[embedding.*],lr_multiplier:2,weight_decay_multiplier:0}]",
            *quiet,
        ),
        (*HYSTERESIS, "data=synthetic", "faults.straggler_every=1", patterns[1], *relative, *quiet, *EXPERTS),
        ("data=synthetic", "precision=fp16", "precision.loss_scale.initial=1e30", "profile=true", patterns[2], *quiet),
    ]
    for number, overrides in enumerate(runs):
        run(composed(*SMALL, *overrides, f"train.output={tmp_path}/{number}"), forecast, read_benchmarks, corpora)
    (tmp_path / "chat.jsonl").write_text('{"p": "one", "r": "two"}\nx\n', encoding="utf-8")
    words = (f"data.train=[{tmp_path}/chat.jsonl]", f"data.validation=[{tmp_path}/chat.jsonl]", "data.weights=[1]")
    keys = (
        "data.tokenizer={kind:bytes}",
        "data.prompt_key=p",
        "data.response_key=r",
        "data.template=plain",
        "data.max_bad=1",
        "model.positions=rope",
        "model.rope_scaling={name:yarn,factor:2,original_sequence:8,mscale_all_dim:1}",
        "model.kind=gpt",
        "model.latent={kv_rank:6,q_rank:8,nope_head_dim:4,rope_head_dim:2,value_head_dim:4}",
    )
    run(
        composed(*SMALL, "data=instructions", *words, *keys, *quiet, f"train.output={tmp_path}/instructions"),
        corpora=corpora,
    )
    dense = f"checkpoint.init_from={tmp_path}/4/checkpoints/step-00000002"
    copied = f"checkpoint.remote=file://{tmp_path}/remote"
    words = (
        "data=synthetic",
        *quiet,
        copied,
        dense,
        "model.experts=2",
        "checkpoint.upcycle=true",
        "checkpoint.verify_every_hours=1",
        "checkpoint.memory_every=1",
    )
    run(composed(*SMALL, *words, f"train.output={tmp_path}/upcycled"))
    with pytest.raises(UserError, match=r"faults\.max_rollbacks = 1 is reached"):
        run(composed(*SMALL, "data=synthetic", *quiet, *ROLLBACK, f"train.output={tmp_path}/rollback"))
    limit = ("train.steps=1000000", "train.stop_after=0.01", "train.stop_status=3", "checkpoint.every=1000000")
    assert run(composed(*SMALL, "data=synthetic", *quiet, *limit, f"train.output={tmp_path}/stopped")) == 3
    Ranks().run(2, lambda rank, world: small_trainer(Layout(context=2, expert=2), "model.experts=2"))
    assert len(all_fields()) > 60
    assert all_fields() - reads - PASSED_ON == set()
