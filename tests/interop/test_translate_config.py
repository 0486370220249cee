"""tools/translate_config.py on the published launch settings of known models."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import UserError
from pangu.config.build import keys_of
from pangu.config.data import StreamData, TokenizerConfig
from pangu.config.optimizer import MuonConfig, ParameterGroup, WeightDecayScheduleConfig
from pangu.config.schema import RunConfig
from pangu.interop.formats.huggingface_config import LATENT_FIELDS
from pangu.interop.formats.megatron_latent import LATENT_OPTIONS
from pangu.interop.translation.launch_script import read_command, read_flags
from pangu.interop.translation.megatron_recipe import schedule
from pangu.interop.translation.report import hydra_value, tables
from pangu.interop.translation.table import Translation, load_table
from pangu.models.size import num_parameters
from pangu.optim.lr_schedule import learning_rate
from tests.configs import composed, config
from tests.end_to_end.commands import called
from tests.pace import processor_time_below
from tests.spawn import repository

LAUNCHES = Path(__file__).parent / "launches"
GPT = shlex.split(
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4 "
    "--global-batch-size 64 --lr 6e-4 --train-iters 1000 --vocab-size 50257 --data-path /data/web"
)


def translate(source: str, *words: object) -> subprocess.CompletedProcess[str]:
    return called("tools/translate_config", "--from", source, *words)


def overrides(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The words that a shell would give to pretrain.py."""
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", ""), comments=True)


def built(done: subprocess.CompletedProcess[str], *more: str) -> RunConfig:
    """Our configuration from these, as pretrain.py composes it."""
    return config(*overrides(done), *more)


def section(done: subprocess.CompletedProcess[str], title: str) -> str:
    """The comments below one title."""
    (text,) = re.findall(rf"^# {title}:\n((?:#   .*\n)+)", done.stdout, re.MULTILINE)
    return text


PUBLISHED = {
    # Narayanan et al. 2021, equation 2, and final norm
    "gpt3_175b.sh": (
        12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048) * 12288 + 2 * 12288,
        ("train.output=runs/gpt3",),
    ),
    # Le Scao et al. 2022, table 3
    "bloom_176b.sh": (176_247_271_424, ("data.tokenizer=null",)),
    "llama2_7b.sh": (6_738_415_616, ("model.vocab=32000",)),
    "llama2_7b.json": (6_738_415_616, ()),
    "llama2_7b.toml": (6_738_415_616, ("batch.global_size=64", "data.tokenizer=null")),
    "llama3_8b.toml": (8_030_261_248, ()),
    "pangu_13b.yaml": (12_800_870_400, ("train.steps=1000",)),
}
"""Weights, and what the files leave open."""
SOURCES = {".sh": "megatron", ".json": "huggingface", ".toml": "torchtitan", ".yaml": "mindformers"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_has_as_many_weights_as_published(name: str) -> None:
    parameters, left_open = PUBLISHED[name]
    done = translate(SOURCES[Path(name).suffix], "--keep-going", LAUNCHES / name)
    translated = built(done, *left_open, *([] if "data.train=???" not in done.stdout else ["data.train=[/data/web]"]))
    assert num_parameters(translated.model) == parameters
    assert f"\n# {parameters:,} parameters; processes: " in done.stdout or "model.vocab" in " ".join(left_open)
    assert "unknown and left out" not in done.stdout


@pytest.mark.parametrize(
    ("start", "increment", "samples", "size", "total"),
    [(16, 16, 5_859_375, 1536, 300_000_000), (192, 16, 9_765_625, 2048, 220_000_000), (8, 8, 100, 64, 90)],
)
def test_a_ramp_of_batches_is_megatrons(start: int, increment: int, samples: int, size: int, total: int) -> None:
    """Compared with Megatron's rule, step by step: START + INCREMENT x floor(consumed / (SAMPLES / increments))."""
    source = Translation(
        load_table("megatron"),
        {"rampup-batch-size": [start, increment, samples], "global-batch-size": size, "train-samples": total},
    )
    schedule(source)
    stages = [(stage["until"], stage["global_size"]) for stage in source.get("batch.stages")]
    consumed = steps = 0
    while consumed <= samples and consumed <= total:
        current = start + increment * int(consumed / (samples / ((size - start) // increment)))
        current = size if consumed > samples else current
        assert current == next((batch for until, batch in stages if steps < until), size)
        consumed, steps = consumed + current, steps + 1
    assert source.get("train.steps") == pytest.approx(steps + max(0, total - consumed) // size, abs=1)


def test_gpt3() -> None:
    done = translate("megatron", LAUNCHES / "gpt3_175b.sh", "DATA_PATH=/data/web")
    (ramp,) = (word for word in overrides(done) if word.startswith("batch.stages="))
    assert ramp.startswith("batch.stages=[{until:3855,global_size:16},{until:5783,global_size:32},")
    assert ramp.count("until") == 95
    assert [word for word in overrides(done) if word != ramp] == shlex.split(
        "model=gpt2_124m precision=fp16 optimizer=adam lr_schedule=cosine data=indexed_gpt2 model.layers=96 "
        "model.hidden=12288 model.heads=96 model.sequence=2048 model.init_std=0.006 parallel.tensor=8 "
        "parallel.pipeline=16 parallel.data=8 batch.global_size=1536 batch.micro_size=1 "
        "precision.loss_scale.initial=4294967296 precision.loss_scale.hysteresis=2 "
        "optimizer.lr=6e-05 optimizer.weight_decay=0.1 optimizer.betas=[0.9,0.95] optimizer.clip=1.0 "
        "lr_schedule.warmup_steps=430 lr_schedule.decay_steps=430000 lr_schedule.min_lr=6e-06 data.train=[/data/web] "
        "train.steps=500000 'train.output=???' validation.every=0 checkpoint.every=10000 metrics.every=100 "
        "metrics.tensorboard=true"
    )
    assert "warm-up and decay count updates" in section(done, "different in effect")
    assert "--split 949,50,1: held-out text is in separate files" in section(done, "no counterpart")
    assert section(done, "to be given") == "#   train.output: --save is $2\n"
    assert section(done, "not given there").count("$") == 2  # --load, --tensorboard-dir
    assert "fp16: gradients are added up over replicas in fp32" in section(done, "different in effect")
    assert "processes: 1024\n" in done.stdout


def test_overlap_of_the_exchange_of_experts_names_our_key() -> None:
    done = translate("megatron", *GPT, "--overlap-moe-expert-parallel-comm")
    assert "--overlap-moe-expert-parallel-comm: parallel.two_batch_overlap=true" in section(done, "no counterpart")


def test_bloom() -> None:
    done = translate("megatron", "--keep-going", LAUNCHES / "bloom_176b.sh")
    translated = built(done, "data.train=[/data/web]", "data.tokenizer=null")
    assert "data.train: prefixes of indexed files" in section(done, "to be given")
    assert (translated.model.positions, translated.model.vocab) == ("alibi", 250880)
    assert (translated.memory.recompute, translated.precision.compute) == ("full", "bf16")
    assert (translated.train.steps, translated.lr_schedule.decay_steps) == (115_311, 105_546)
    assert (translated.train.stop_after, translated.train.output) == ("5990m", "/checkpoints/bloom")
    assert translated.model.embedding_norm
    assert "data.tokenizer: --tokenizer-name-or-path is $TOKENIZER" in section(done, "to be given")


def test_llama_with_a_blend() -> None:
    done = translate("megatron", LAUNCHES / "llama2_7b.sh", "DATA=/mnt/text")
    assert "model.vocab: number of the tokenizer's pieces, e.g. 32000 of Llama 2" in section(done, "to be given")
    translated = built(done, "model.vocab=32000")
    assert (translated.parallel.data, translated.parallel.tensor) == (2, 4)  # of --nproc-per-node=8
    assert (translated.parallel.zero, translated.parallel.sequence) == (1, True)
    assert translated.data == config("data=indexed", *DATA).data
    assert (translated.validation.every, translated.validation.sequences) == (1000, 8 * 1024)
    assert (translated.model.kv_heads, translated.model.norm_eps) == (None, 1e-5)


DATA = (
    "data.train=[/mnt/text_web,/mnt/text_books]",
    "data.weights=[0.7,0.3]",
    "data.validation=[/mnt/text_held_out]",
    "data.tokenizer={kind:sentencepiece,path:tokenizer.model}",
)


def test_experts_pipeline_and_recompute_of_megatron() -> None:
    words = shlex.split(
        "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --lr 1e-3 "
        "--global-batch-size 64 --train-samples 6400 --vocab-size 99 --tokenizer-type NullTokenizer --mock-data "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 3 --num-experts 8 --moe-layer-freq ([0]*2+[0,1]*7) "
        "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64 --moe-aux-loss-coeff 0.01 "
        "--moe-router-load-balancing-type global_aux_loss --context-parallel-size 2 --cp-comm-type a2a "
        "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 20 --lr-warmup-samples 640 "
        "--group-query-attention --num-query-groups 2 --window-size 63,0 --kv-channels 32 --swiglu "
        "--use-rotary-position-embeddings --use-rope-scaling --clip-grad 0 --grad-reduce-in-bf16 --bf16"
    )
    translated = built(translate("megatron", *words))
    model, parallel, schedule = translated.model, translated.parallel, translated.lr_schedule
    assert (model.dense_layers, model.expert_every, model.shared_experts, model.experts_per_token) == (2, 2, 2, 2)
    assert (model.router.balance, model.router.balance_weight) == ("global", 0.01)
    assert (model.kv_heads, model.head_dim, model.window, model.vocab) == (2, 32, 64, 100)
    assert model.ffn == int(4 * 64 * 2 / 3 / 64) * 64
    assert model.rope_scaling is not None
    assert model.rope_scaling.factor == 8.0
    assert (parallel.schedule, parallel.virtual_stages, parallel.context_kind) == ("interleaved", 2, "ulysses")
    assert (translated.memory.recompute, translated.optimizer.clip, translated.precision.reduce) == (3, None, "bf16")
    assert (translated.train.steps, schedule.shape, schedule.decay_steps, schedule.warmup_steps) == (100, "wsd", 20, 10)


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --lr 1e-3 "
    "--global-batch-size 64 --train-iters 64 --vocab-size 99 --tokenizer-type NullTokenizer --mock-data "
)


def test_schedules_of_megatron() -> None:
    words = "--lr-decay-style inverse-square-root --min-lr 1e-5 --lr-warmup-iters 4 --fp16 --end-weight-decay 0.2"
    words += " --start-weight-decay 0.1 --weight-decay-incr-style cosine"
    translated = built(translate("megatron", *shlex.split(MEGATRON + words)))
    schedule, scale = translated.lr_schedule, translated.precision.loss_scale
    assert (schedule.shape, schedule.min_lr, schedule.warmup_steps) == ("inverse_sqrt", 1e-5, 4)
    assert scale is not None
    assert scale.hysteresis == 2
    assert translated.optimizer.weight_decay == 0.2
    assert translated.weight_decay_schedule == WeightDecayScheduleConfig(0.1, "cosine")
    words = "--lr-decay-style WSD --lr-wsd-decay-iters 20 --fp16 --hysteresis 4 --decoupled-lr 5e-4"
    done = translate("megatron", *shlex.split(f"{MEGATRON} {words} --min-lr 1e-5 --decoupled-min-lr 5e-6"))
    assert "decoupled-lr" not in section(done, "different in effect")
    translated = built(done)
    assert translated.parameter_groups == (ParameterGroup(("embedding.word.weight",), 0.5),)
    done = translate(
        "megatron", *shlex.split(f"{MEGATRON} {words} --untie-embeddings-and-output-weights --min-lr 1e-5")
    )
    assert built(done).parameter_groups == (ParameterGroup(("embedding.word.weight", "head.weight"), 0.5),)
    assert "ends at decoupled-lr x min-lr / lr" in section(done, "different in effect")
    schedule, scale = translated.lr_schedule, translated.precision.loss_scale
    assert (schedule.shape, schedule.decay_steps, schedule.decay_shape) == ("wsd", 20, "exponential")
    assert scale is not None
    assert scale.hysteresis == 4
    assert translated.weight_decay_schedule is None


def test_muon_of_megatron() -> None:
    words = shlex.split(
        f"{MEGATRON} --optimizer dist_muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --adam-beta2 0.95 "
        "--muon-tp-mode duplicated"
    )
    optimizer = built(translate("megatron", *words)).optimizer
    assert isinstance(optimizer, MuonConfig)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.adjust_lr) == (0.9, False, "match_rms_adamw")
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-3, (0.9, 0.95), 0.01)
    refused = translate("megatron", *words, "--muon-scale-mode", "unit_rms_norm", "--muon-no-split-qkv")
    assert "--muon-extra-scale-factor 0.2: optimizer.adjust_lr=match_rms_adamw is" in refused.stdout
    assert "--muon-no-split-qkv: queries, keys and values" in refused.stdout


def test_qk_clip_of_megatron() -> None:
    """100, or the threshold that is given; unequal shares of queries and keys have no counterpart, nor has AdamW."""
    words = shlex.split(f"{MEGATRON} --optimizer muon --muon-extra-scale-factor 0.2 --qk-clip")
    for more, threshold in ((), 100.0), (("--qk-clip-threshold", "30", "--qk-clip-alpha", "0.5"), 30.0):
        optimizer = built(translate("megatron", *words, *more)).optimizer
        assert isinstance(optimizer, MuonConfig)
        assert optimizer.qk_clip == threshold
    assert "--qk-clip-alpha 0.3: QK-clip scales" in translate("megatron", *words, "--qk-clip-alpha", "0.3").stdout
    adam = translate("megatron", *shlex.split(f"{MEGATRON} --qk-clip"))
    assert "--qk-clip: optimizer.qk_clip is a key of Muon" in adam.stdout


def test_deepspeed() -> None:
    done = translate("deepspeed", LAUNCHES / "deepspeed.json")
    translated = built(done, "data=synthetic", "validation.every=0")
    assert (translated.batch.global_size, translated.parallel.zero) == (2048, 3)
    assert translated.memory.offload == ("optimizer", "parameters")
    assert translated.precision.loss_scale is not None
    assert (translated.precision.loss_scale.initial, translated.optimizer.clip) == (2.0**16, 1.0)
    assert (translated.lr_schedule.shape, translated.lr_schedule.min_lr) == ("cosine", pytest.approx(6e-6))
    assert translated.precision.loss_scale.hysteresis == 2
    assert "lr x log\\(i \\+ 1\\)" not in section(done, "different in effect")
    assert "gradient_accumulation_steps: auto" in section(done, "not given there")
    assert " parameters;" not in done.stdout  # the model is not in the file


@pytest.mark.parametrize(
    ("params", "scheduler", "lr", "apart"),
    [
        ({"lr": 2e-3, "momentum": 0.9, "ns_method": "standard"}, {}, 2e-3, None),
        ({"lr": 2e-3, "muon_lr": 1e-2}, {}, 1e-2, "optimizer.params.lr 0.002"),
        ({"adam_lr": 1e-3}, {}, 0.02, "optimizer.params.adam_lr 0.001"),
        ({"muon_lr": 1e-3, "adam_lr": 1e-3}, {}, 1e-3, None),
        ({"weight_decay": 0.0}, {}, 0.02, "optimizer.params.adam_lr 0.0003"),
        ({"muon_lr": 1e-2}, {"warmup_max_lr": 5e-3}, 5e-3, None),
    ],
)
def test_muon_of_deepspeed(
    params: dict[str, Any], scheduler: dict[str, float], lr: float, apart: str | None, tmp_path: Path
) -> None:
    """DeepSpeed has a rate of matrices and one of the rest, and other defaults than for Adam."""
    settings: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    settings["optimizer"] = {"type": "Muon", "params": params}
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, **scheduler}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    done = translate("deepspeed", tmp_path / "ds.json")
    optimizer = built(done, "data=synthetic", "validation.every=0").optimizer
    assert isinstance(optimizer, MuonConfig)
    assert (optimizer.lr, optimizer.momentum) == (lr, params.get("momentum", 0.95))
    assert (optimizer.adjust_lr, optimizer.nesterov, optimizer.ns_steps) == ("original", True, 5)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.95), 1e-10, 0.0)
    assert ("one learning rate for matrices" in done.stdout) == (apart is not None)
    assert apart is None or f"{apart}: Muon: one learning rate" in section(done, "no counterpart")
    assert "unknown" not in done.stdout


def curriculum(folder: Path, kind: str, schedule: dict[str, Any], **more: Any) -> subprocess.CompletedProcess[str]:
    """A translation of a curriculum of sequence lengths from 64 to 1024 tokens, in batches of 48."""
    settings = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 64, "max_difficulty": 1024, **more}
    settings |= {"schedule_type": kind, "schedule_config": schedule}
    batch = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps({**batch, "curriculum_learning": settings}))
    return translate("deepspeed", folder / "ds.json")


def stages_of(done: subprocess.CompletedProcess[str]) -> list[tuple[int, int | None]]:
    translated = built(done, "data=synthetic", "validation.every=0")
    assert translated.model.sequence == 1024
    return [(stage.until, stage.sequence) for stage in translated.batch.stages]


def test_lengths_by_step_of_deepspeed(tmp_path: Path) -> None:
    """A length holds up to its last step, counted from 1 there, and `until` steps are before the next stage here."""
    done = curriculum(tmp_path, "fixed_discrete", {"difficulty": [64, 256, 512, 1024], "max_step": [10, 25, 40]})
    assert stages_of(done) == [(10, 64), (25, 256), (40, 512)]
    assert "curriculum: sequences grow" not in done.stdout
    assert "the end of each sample is discarded" in section(done, "different in effect")
    assert "no counterpart" not in done.stdout


@pytest.mark.parametrize(
    ("kind", "degree", "unit"), [("fixed_linear", 1, 8), ("fixed_root", 2, 8), ("fixed_root", 3, 96)]
)
def test_growing_lengths_of_deepspeed(kind: str, degree: int, unit: int, tmp_path: Path) -> None:
    """Each step has the largest divisor of 1024 up to its length there of which 48 sequences are whole samples."""
    schedule = {"total_curriculum_step": 300, "difficulty_step": unit, "root_degree": degree}
    done = curriculum(tmp_path, kind, schedule)
    possible = [64, 128, 256, 512, 1024]  # of 32 tokens a sample has 32 parts
    stages = stages_of(done)
    for step in range(1, 400):
        grown = int((step / 300) ** (1 / degree) * 960 + 64)
        length = min(1024, max(grown // unit * unit, -(-64 // unit) * unit))
        here = next((sequence for until, sequence in stages if step <= until), 1024)
        assert here == max(one for one in possible if one <= length), step
    assert len(stages) >= 3
    assert "curriculum: sequences grow through the divisors" in section(done, "different in effect")


def test_curricula_without_a_counterpart_are_told(tmp_path: Path) -> None:
    odd = curriculum(tmp_path, "fixed_discrete", {"difficulty": [96, 1024], "max_step": [10]})
    assert "schedule_config.difficulty [96, 1024]: curriculum: lengths that do not divide" in odd.stdout
    other = curriculum(tmp_path, "custom", {})
    assert "schedule_type custom: curriculum: lengths that do not divide" in section(other, "no counterpart")
    steps = {"total_curriculum_step": 9, "difficulty_step": 8}
    words = curriculum(tmp_path, "fixed_linear", steps, curriculum_type="vocabularyrarity")
    assert "curriculum_type vocabularyrarity: samples are not sorted" in section(words, "no counterpart")
    off = curriculum(tmp_path, "fixed_linear", steps, enabled=False)
    assert all("batch.stages" not in done.stdout.partition("#")[0] for done in (odd, other, words, off))
    missing = curriculum(tmp_path, "fixed_root", steps)
    assert missing.returncode == 2
    assert "schedule_config.root_degree: is required by schedule_type = fixed_root" in missing.stderr
    backwards = curriculum(tmp_path, "fixed_discrete", {"difficulty": [64, 512, 1024], "max_step": [9, 9]})
    assert "max_step = [9, 9]: must increase, with one entry fewer than" in backwards.stderr


def test_a_curriculum_of_truncated_samples(tmp_path: Path) -> None:
    """DeepSpeed's data efficiency has it as one metric among others."""
    metric = {"clustering_type": "single_cluster", "difficulty_type": "value", "min_difficulty": 256}
    metric |= {"max_difficulty": 1024, "schedule_type": "fixed_linear"}
    metric |= {"schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8}}
    learning = {"enabled": True, "data_cluster_path": "x"}
    learning |= {"curriculum_metrics": {"seqlen_truncate": metric, "rarity": {"a": 1}}}
    sampling = {"enabled": True, "num_epochs": 1, "curriculum_learning": learning}
    values = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 2,
        "data_efficiency": {"enabled": True, "data_sampling": sampling},
    }
    (tmp_path / "ds.json").write_text(json.dumps(values))
    done = translate("deepspeed", tmp_path / "ds.json")
    assert stages_of(done) == [(33, 256), (99, 512)]
    assert section(done, "no counterpart").count("data_efficiency") == 1
    assert "curriculum_metrics.rarity.a 1: samples are not sorted" in section(done, "no counterpart")
    assert "unknown" not in done.stdout


def test_torchtitan() -> None:
    done = translate("torchtitan", LAUNCHES / "llama3_8b.toml")
    translated = built(done, "data.train=[/data/web]")
    parallel = translated.parallel
    assert (parallel.data, parallel.zero, parallel.zero_group, parallel.sequence) == (16, 2, 8, True)
    assert (parallel.schedule, parallel.virtual_stages, translated.batch.micro_size) == ("interleaved", 2, 1)
    assert (translated.precision.matmul, translated.memory.recompute) == ("fp8", 4)
    assert (translated.lr_schedule.shape, translated.lr_schedule.decay_steps) == ("wsd", 800)
    assert translated.lr_schedule.min_lr == pytest.approx(3e-5)
    assert (translated.checkpoint.every, translated.checkpoint.keep, translated.checkpoint.asynchronous) == (
        500,
        10,
        True,
    )


@pytest.mark.parametrize(("ratio", "steps"), [("decay_ratio = 0.4", 400), ("", 800)])
def test_the_decay_by_a_root_of_torchtitan(tmp_path: Path, ratio: str, steps: int) -> None:
    text = (LAUNCHES / "llama3_8b.toml").read_text().replace("decay_ratio = 0.8", ratio)
    (tmp_path / "train.toml").write_text(text.replace('decay_type = "linear"', 'decay_type = "sqrt"'))
    schedule = built(translate("torchtitan", tmp_path / "train.toml"), "data.train=[/data/web]").lr_schedule
    assert (schedule.shape, schedule.decay_shape, schedule.decay_steps) == ("wsd", "minus_sqrt", steps)


def test_text_that_torchtitan_streams(tmp_path: Path) -> None:
    """C4, from the hub or a copy, in its order."""
    done = translate("torchtitan", LAUNCHES / "llama2_7b.toml")
    assert {"data=stream", "data.train=['hf:allenai/c4:en:train']", "data.shuffle=0"} < set(overrides(done))
    assert "data.tokenizer: e.g. {kind:huggingface" in section(done, "to be given")
    assert "torchtitan begins each with" in section(done, "different in effect")
    text = (LAUNCHES / "llama2_7b.toml").read_text().replace("[model]", '[model]\nhf_assets_path = "/m/llama"')
    text = text.replace('dataset = "c4"', 'dataset = "c4"\ndataset_path = "/data/c4"')
    (tmp_path / "train.toml").write_text(text + '[validation]\nenable = true\ndataset = "c4_validation"\n')
    data = built(translate("torchtitan", tmp_path / "train.toml"), "batch.global_size=64").data
    assert isinstance(data, StreamData)
    assert (data.train, data.validation) == (("hf:/data/c4:en:train",), ("hf:allenai/c4:en:validation",))
    assert data.tokenizer == TokenizerConfig("huggingface", "/m/llama")


MOE_YAML = """
runner_config: {batch_size: 1}
parallel_config: {data_parallel: 4, context_parallel: 2, context_parallel_algo: ulysses_cp, expert_parallel: 4}
moe_config: {expert_num: 16, num_experts_chosen: 4, moe_intermediate_size: 64, shared_expert_num: 1, n_group: 4,
  topk_group: 2, first_k_dense_replace: 1, norm_topk_prob: false, routed_scaling_factor: 2.5, use_gating_sigmoid: true,
  aux_loss_factor: 0.05, balance_via_topk_bias: true, topk_bias_update_rate: 0.0001, use_shared_expert_gating: true}
train_dataset:
  data_loader:
    type: BlendedMegatronDatasetDataLoader
    config: {seed: 1, eod: 7, pad: -1, reset_attention_mask: true, reset_position_ids: true,
      data_path: ['0.3', /d/a, '0.7', /d/b]}
model:
  model_config: {type: LlamaConfig, num_layers: 4, hidden_size: 64, num_heads: 4, seq_length: 64, vocab_size: 99}
lr_schedule: {type: cosine, learning_rate: 1e-3, total_steps: 10}
"""


def test_experts_sequences_and_blends_of_mindformers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MOE_YAML)
    assert translate("mindformers", tmp_path / "run.yaml").returncode == 2
    done = translate("mindformers", "--keep-going", tmp_path / "run.yaml")
    translated = built(done)
    model, router = translated.model, translated.model.router
    assert (model.experts, model.experts_per_token, model.expert_ffn, model.shared_experts) == (16, 4, 64, 1)
    assert (model.dense_layers, router.score, router.normalised, router.scale) == (1, "sigmoid", False, 2.5)
    assert (router.selection, router.groups, router.groups_per_token) == ("group_limited", 4, 2)
    assert (router.balance, router.bias_rate) == ("bias", 0.0001)
    assert (translated.parallel.context, translated.parallel.context_kind) == (2, "ulysses")
    assert translated.data == config("data=indexed", *MOE_DATA).data
    assert "use_shared_expert_gating: this router is not supported" in section(done, "no counterpart")
    assert "unknown and left out" not in done.stdout


MOE_DATA = (
    "data.train=[/d/a,/d/b]",
    "data.weights=[0.3,0.7]",
    "data.packing.eod=7",
    "data.packing.reset_mask=true",
    "data.packing.reset_positions=true",
)


@pytest.mark.parametrize(
    "words",
    [
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
        "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 4",
    ],
)
def test_heads_and_rings_together_of_megatron(words: str) -> None:
    parallel = built(translate("megatron", *GPT, "--context-parallel-size", "8", *words.split())).parallel
    assert (parallel.context, parallel.context_kind, parallel.context_ulysses) == (8, "ring", 4)


def test_conversations_and_dense_models_to_begin_with_of_megatron() -> None:
    words = "--sft --tokenizer-type SFTTokenizer --tokenizer-model /m --sft-tokenizer-prompt-format nemotron-nano-v2"
    words += " --num-experts 4 --moe-use-upcycling --context-parallel-size 2 --cp-comm-type allgather"
    done = translate("megatron", *GPT, *words.split())
    given = ("data.template=chatml", "checkpoint.init_from=/dense")
    translated = built(done, *given)
    assert translated.data == config("data=instructions", *given[:1], "data.train=[/data/web]", SFT_TOKENIZER).data
    assert (translated.checkpoint.upcycle, translated.parallel.context_kind) == (True, "gather")
    assert "data.template selects how a conversation becomes text" in section(done, "no counterpart")
    assert "checkpoint.init_from: the dense model's" in section(done, "to be given")


@pytest.mark.parametrize("start", ["decay_start_steps: 70", "decay_start_ratio: 0.7"])
@pytest.mark.parametrize("end", ["", ", lr_end: 1e-5"])
def test_stable_rates_of_mindformers(start: str, end: str, tmp_path: Path) -> None:
    schedule = f"{{type: WarmUpStableDecayLR, learning_rate: 1e-3, total_steps: 100, warmup_steps: 10, {start}{end}}}"
    path = tmp_path / "run.yaml"
    path.write_text(MOE_YAML.replace("{type: cosine, learning_rate: 1e-3, total_steps: 10}", schedule))
    ours = built(translate("mindformers", "--keep-going", path))
    least = 1e-5 if end else 1e-7
    rates = [learning_rate(ours.lr_schedule, ours.optimizer.lr, ours.train.steps, update) for update in range(100)]
    assert rates[10:71] == pytest.approx([1e-3] * 61)
    assert rates[85] == pytest.approx((1e-3 + least) / 2)
    assert (ours.lr_schedule.shape, ours.lr_schedule.min_lr) == ("wsd", least)


def test_rates_of_mindformers_end_where_its_classes_end(tmp_path: Path) -> None:
    for name, least in ("cosine", 0.0), ("PolynomialWithWarmUpLR", 1e-7):
        (tmp_path / "run.yaml").write_text(MOE_YAML.replace("type: cosine", f"type: {name}"))
        assert built(translate("mindformers", "--keep-going", tmp_path / "run.yaml")).lr_schedule.min_lr == least
    (tmp_path / "run.yaml").write_text(MOE_YAML.replace("type: cosine", "type: WarmUpStableDecayLR"))
    done = translate("mindformers", "--keep-going", tmp_path / "run.yaml")
    assert "lr_schedule.decay_steps: train.steps - the first step of the decay" in section(done, "to be given")


SFT_TOKENIZER = "data.tokenizer={kind:huggingface,path:/m}"


def test_mindformers() -> None:
    done = translate("mindformers", LAUNCHES / "pangu_13b.yaml")
    translated = built(done, "train.steps=1000", "data.train=[/data/web]")
    assert translated.model == config("model=pangu_13b", "model.activation=fast_gelu", "model.ffn=20480").model
    assert (translated.batch.global_size, translated.batch.micro_size) == (4 * 4 * 32, 4)
    assert (translated.parallel.tensor, translated.parallel.data, translated.parallel.zero) == (2, 4, 1)
    assert translated.data.packing == config("data=indexed_pangu").data.packing
    assert (translated.lr_schedule.shape, translated.lr_schedule.min_lr) == ("linear", 1e-6)
    assert (translated.checkpoint.every, translated.checkpoint.asynchronous) == (500, False)
    assert "processes: 32\n" in done.stdout  # tensor 2, pipeline 4, data 4
    assert "train.steps: runner_config.epochs x samples / batch.global_size" in section(done, "to be given")


def test_mixtral_of_transformers(tmp_path: Path) -> None:
    fields = {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
    fields |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "flavour": "mint"}))
    done = translate("huggingface", "--keep-going", tmp_path / "config.json")
    assert num_parameters(built(done).model) == 46_702_792_704
    assert "flavour: mint" in section(done, "unknown and left out")


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"model_type": "gpt_neox", "rotary_pct": 0.5, "use_parallel_residual": False}, "parallel_block=False"),
        ({"model_type": "starcoder2", "use_bias": False}, "biases=False"),
        ({"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4}, "embedding_norm=True"),
    ],
)
def test_fields_of_transformers_that_stand_for_several_keys(fields: dict[str, Any], key: str, tmp_path: Path) -> None:
    if "n_embed" not in fields:
        fields |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        fields |= {"max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 1024}))
    model = built(translate("huggingface", tmp_path / "config.json")).model
    name, _, value = key.partition("=")
    assert (model.layers, model.hidden, str(getattr(model, name))) == (2, 64, value)


def test_learning_rates_are_those_that_the_page_tells() -> None:
    """Those of Megatron-LM's optimizer_param_scheduler.py, one update apart in the warm-up and equal from then on."""
    words = ["--lr-decay-style", "cosine", "--min-lr", "6e-5", "--lr-warmup-iters", "10", "--lr-decay-iters", "800"]
    ours = built(translate("megatron", *GPT, *words))

    def megatron_rate(update: int) -> float:
        if update <= 10:
            return 6e-4 * update / 10
        ratio = min(1.0, (update - 10) / (800 - 10))
        return 6e-5 + (6e-4 - 6e-5) * 0.5 * (math.cos(math.pi * ratio) + 1)

    rates = [learning_rate(ours.lr_schedule, ours.optimizer.lr, ours.train.steps, update) for update in range(1000)]
    assert rates[:10] == pytest.approx([megatron_rate(update + 1) for update in range(10)])
    assert rates[10:] == pytest.approx([megatron_rate(update) for update in range(10, 1000)])


def test_settings_that_are_not_known_are_named() -> None:
    words = [*GPT, "--use-magic", "--spell", "lumos", "7"]
    done = translate("megatron", "--keep-going", *words)
    assert section(done, "unknown and left out") == "#   --use-magic: true\n#   --spell: [lumos, 7]\n"
    refused = translate("megatron", *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--use-magic: is unknown, and may change the model\n  --spell [lumos, 7]: is unknown" in refused.stderr


def test_more_tensor_parallel_ranks_than_query_groups() -> None:
    """Megatron splits a group over ranks too, if there are as many for each."""
    words = ("--group-query-attention", "--num-query-groups", "3", "--tensor-model-parallel-size")
    found = built(translate("megatron", *GPT, *words, "6"))
    assert (found.model.kv_heads, found.parallel.tensor) == (3, 6)
    refused = translate("megatron", *GPT, *words, "4")
    assert refused.returncode == 2
    rule = "(--tensor-model-parallel-size) = 4: must divide model.kv_heads = 3, or be a multiple of it"
    assert rule in refused.stderr


def test_what_our_checks_refuse_names_the_setting() -> None:
    done = translate("megatron", *GPT, "--num-attention-heads", "11", "--tensor-model-parallel-size", "5")
    assert done.returncode == 2
    assert "model.heads (--num-attention-heads) = 11: must divide model.hidden = 768" in done.stderr
    assert "parallel.tensor (--tensor-model-parallel-size) = 5: must divide" in done.stderr
    assert done.stdout == ""


def test_what_has_to_be_given_is_asked_for() -> None:
    done = translate("megatron", *GPT[2:18])
    assert "model.layers: --num-layers is not given" in section(done, "to be given")
    assert "model.vocab" not in section(done, "to be given")
    assert "model.layers=???" in overrides(done)
    assert "parameters" not in done.stdout.partition("processes")[0]


CASES: dict[str, tuple[str, str | None, str]] = {
    "not JSON": ("deepspeed", "{", "is not JSON"),
    "not YAML": ("mindformers", "a: [", "is not YAML"),
    "a list of itself": ("mindformers", "a: &a [*a]", "is not YAML (its references expand to more than 100,000"),
    "not TOML": ("torchtitan", "a = ", "is not TOML"),
    "a list": ("deepspeed", "[1]", "is not a mapping of settings"),
    "empty": ("deepspeed", "{}", "has no settings"),
    "nothing there": ("torchtitan", None, "No such file or directory"),
    "many": ("deepspeed", json.dumps(dict.fromkeys(map(str, range(10_001)), 1)), "more than 10,000 settings"),
    "no type": ("huggingface", '{"hidden_size": 8}', "model_type = '': is not supported"),
    "text for a number": ("deepspeed", '{"train_batch_size": "many"}', "train_batch_size = many: must be a number"),
    "a text for a factor": (
        "mindformers",
        "moe_config: {expert_num: 4, aux_loss_types: [expert], aux_loss_factors: [much]}",
        "moe_config.aux_loss_factors = [much]: must be numbers",
    ),
    "a text for a group": (
        "deepspeed",
        '{"zero_optimization": {"mics_shard_size": "all"}}',
        "parallel.zero_group (zero_optimization.mics_shard_size) = 'all': must be",
    ),
    "not whole": ("deepspeed", '{"train_batch_size": 1.5}', "train_batch_size = 1.5: must be an integer"),
    "none": ("deepspeed", '{"train_batch_size": 0}', "train_batch_size = 0: must be at least 1"),
    "no truth": ("deepspeed", '{"bf16": {"enabled": "yes"}}', "bf16.enabled = yes: must be true or false"),
    "a list for a name": ("torchtitan", "[model]\nflavor = [1]", "model.flavor = [1]: must be a single value"),
    "an open quote": ("megatron", "A=1\nB='x\n", "line 2: the quotation mark ' does not end"),
    "no command": ("megatron", "echo hello\n", "no command that runs pretrain_gpt.py"),
    "no option": ("megatron", "python pretrain_gpt.py 5 --lr 1", "5: expected an option of pretrain_gpt.py"),
    "doubling": ("megatron", "A=aaaaaaaa\n" + "A=$A$A\n" * 40, "$A$A expands to more than 1,000,000 characters"),
    "aliases": (
        "mindformers",
        "a: &a {x: 1, y: 2}\n"
        + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 30)).replace("*a0", "*a"),
        "is not YAML (its references expand to more than 100,000 values)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    source, text, says = CASES[name]
    path = tmp_path / "settings"
    if text is not None:
        path.write_text(text)
    done = translate(source, path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_shell_would_do() -> None:
    script = """
    A=(--one "two  words" $B)   # it's a comment
    B='$A'; C="x\\"y"
    export D=${E:-default}$((3*(2+1))) F+=f
    if true; then A+=(--three=3 "${C}" ${D}); fi
    python some/pretrain_gpt.py "${A[@]}" --four \\
        -5 1_000 --six $G `date` \\
        "$(echo "a b")" --seven a;echo --eight
    """
    words, conditional, *_ = read_command(script, "script", {"G": "given"})
    assert conditional == {"A": '--one two  words $B --three=3 x"y default9'}
    assert words == [
        "--one",
        "two  words",
        "$B",
        "--three=3",
        'x"y',
        "default9",
        "--four",
        "-5",
        "1_000",
        "--six",
        "given",
        "`date`",
        '$(echo "a b")',
        "--seven",
        "a",
    ]
    assert read_flags(words)["four"] == [-5, 1000]


def test_conditions_of_a_script_are_told(tmp_path: Path) -> None:
    """They are not looked at."""
    lines = ("case $SIZE in", "small) TP=2 ;;", "*) TP=4 ;;", "esac", "PP=1 && true", "[[ -n $X ]] || X=1\r")
    lines += ("if a; then if b; then Y=1; fi; fi", "TP=6", "if c; then Z=1; fi", "PP=2")
    command = shlex.join(["python", "pretrain_gpt.py", *GPT]) + " --tensor-model-parallel-size $TP"
    (tmp_path / "run.sh").write_text("\n".join([*lines, command]))
    done = translate("megatron", tmp_path / "run.sh")
    said = section(done, "set conditionally there, the last value is used")
    assert said == "#   TP: 6\n#   X: 1\n#   Y: 1\n#   Z: 1\n"
    assert built(done).parallel.tensor == 6
    done = translate("megatron", tmp_path / "run.sh", "TP=2", "X=2", "Y=1", "Z=1")
    assert "set conditionally" not in done.stdout
    assert built(done).parallel.tensor == 2


def test_the_loss_of_a_micro_batch_counts_its_sequences_together() -> None:
    words = [*GPT, "--num-experts", "8", "--moe-aux-loss-coeff", "0.01"]
    counted = (built(translate("megatron", *words, *more)).model.router for more in ([], ["--seq-aux"]))
    assert [(router.balance, router.balance_sequences) for router in counted] == [("sequence", 4), ("sequence", 1)]


def test_commands_of_other_branches_are_told(tmp_path: Path) -> None:
    """The command with most options is used; what a variable holds before it is run is no other one."""
    command = shlex.join(["torchrun", "pretrain_gpt.py", *GPT])
    (tmp_path / "run.sh").write_text(f"if a; then\n{command}\nelse\n{command} --lr-warmup-iters 7\nfi\n")
    assert "# other commands there" not in translate("megatron", tmp_path / "run.sh").stdout
    (tmp_path / "run.sh").write_text(f"if a; then\n{command} --seed 1\nelse\n{command} --seed 2 --bf16\nfi\n")
    done = translate("megatron", tmp_path / "run.sh")
    assert "\n# other commands there: 1; the one with the most options is used\n" in done.stdout
    assert built(done).train.seed == 2
    (tmp_path / "run.sh").write_text(f'CMD="{command}"\n$CMD --seed 3\n')
    assert "# other commands there" not in translate("megatron", tmp_path / "run.sh").stdout


@pytest.mark.parametrize(
    "value", ["it's", "a b", "null", "7", "C:\\x\\", "x\\'y", "a,b", "/data/web", "~/x", "a=b", ""]
)
def test_texts_stay_texts(value: str) -> None:
    word = f"metrics.wandb_project={hydra_value(value)}"
    assert composed(word)["metrics"]["wandb_project"] == value
    assert composed("data=indexed", f"data.train={hydra_value([value])}")["data"]["train"] == [value]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_show_the_mapping(language: str) -> None:
    name = "moving-over.md" if language == "en" else "moving-over.zh.md"
    page = (repository() / "docs" / name).read_text(encoding="utf-8")
    done = called("tools/translate_config", "--tables", language)
    assert page.partition("\n## ")[1:] == ("\n## ", tables(language).removeprefix("## "))
    assert done.stdout == tables(language) + "\n"


GROUPS = {path.name for path in (repository() / "configs").iterdir() if path.is_dir()}
PROGRAMS = ("megatron", "deepspeed", "mindformers", "torchtitan")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_of_a_table_is_read_and_every_text_is_used(program: str) -> None:
    table: Any = load_table(program)
    rules = sorted((repository() / "pangu/interop/translation").glob(f"{program}*.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in rules)
    if "LATENT_FIELDS" in source:
        source += "".join(f'"{name}"' for name in LATENT_FIELDS.values())
    if "LATENT_OPTIONS" in source:
        source += "".join(f'"{name.replace("_", "-")}"' for name in LATENT_OPTIONS.values())
    keys = {
        *keys_of(RunConfig),
        *GROUPS,
        "precision.loss_scale",
        "parameter_groups",
        "model.rope_scaling",
        "model.latent",
        "data.tokenizer",
    }
    for name, listed in {**table.direct, **table.read}.items():
        assert all(key in keys for key in listed.split(", ")), listed
        assert name in table.direct or re.search(rf"[\".{{}}]{re.escape(name.rpartition('.')[2])}\"", source), name
    used = {*table.absent, *table.always, *(table.notes or {}).values(), *re.findall(r'"(\w+)"', source), "value"}
    assert set(table.texts) <= used
    for name in (
        *(table.defaults or {}),
        *(table.aliases or {}).values(),
        *(table.required or {}),
        *(table.notes or {}),
    ):
        assert table.keys(name) or table.why_absent(name), name


LONG = {
    "defaults": "A=" + "${B:-" * 100_000 + "x" + "}" * 100_000,
    "open braces": "A=" + "${" * 200_000,
    "a growing variable": "A+=x\n" * 100_000,
    "assignments": "A=1 " * 200_000,
    "conditions": "if " * 200_000,
    "documents": "cat <<EOF\n" * 80_000,
    "uses of a long variable": f"B='{'x ' * 400_000}'\n" + "echo $B\n" * 15_000,
    "uses in commands": f"B='{'x ' * 400_000}'\n" + "pretrain_gpt.py --b $B\n" * 6_000,
    "uses of an array": "A=(" + "x " * 10_000 + ")\n" + 'echo "${A[@]}"\n' * 40_000,
    "sums": "".join(f"A{n}=1\n" for n in range(10_000)) + "A=$((A1+1))\n" * 20_000,
    "other documents": "\n".join(f"cat <<E{number}" for number in range(60_000)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_scripts_end_in_seconds(name: str) -> None:
    """Processor time; where a step is quadratic, it is minutes."""
    with processor_time_below(5.0), contextlib.suppress(UserError):
        read_command(f"{LONG[name]}\ntorchrun pretrain_gpt.py --num-layers 4\n", "train.sh", {})


@pytest.mark.parametrize(
    ("before", "value"), [("", "7"), ("Y=5", "5"), ("X=3", "3"), ("X=3; Y=5", "3"), ("cat <<EOF\nX=4\nEOF", "7")]
)
def test_defaults_stand_inside_of_defaults(before: str, value: str) -> None:
    script = f"{before}\ntorchrun pretrain_gpt.py --seed ${{X:-${{Y:-${{Z:-7}}}}}}\n"
    assert read_command(script, "train.sh", {}).words == ["--seed", value]
