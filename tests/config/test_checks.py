"""Contradictions between keys: key, value, rule and what would work."""

from __future__ import annotations

from typing import get_args

import pytest
from omegaconf import ListConfig, OmegaConf

from pangu.common.errors import ConfigError
from pangu.config.checks import check, find_problems
from pangu.config.layout_checks import layout_problems
from pangu.config.schema import TaskName
from pangu.tasks.catalogue import TASKS
from tests.configs import RECIPES, composed, config

SCALING = "model.rope_scaling={factor:8,low_freq_factor:1,high_freq_factor:4,original_sequence:64}"

LATENT = "model.latent={kv_rank:6,nope_head_dim:8,rope_head_dim:4,value_head_dim:8}"
SIZES = ("model.hidden=128", "model.heads=8", "model.positions=learned")
"""What messages name where no preset is chosen, whatever the quickstart's model is."""


def problems(*overrides: str, world: int = 1) -> str:
    chosen = any(word.startswith(("+config=", "model=")) for word in overrides)
    checked, found = find_problems(composed(*(() if chosen else SIZES), *overrides))
    return str(ConfigError(found + layout_problems(checked, world)))


CONTRADICTIONS = {
    **{
        f"data=stream data.train=[a] data.tokenizer={{kind:bytes}} validation.every=0 {words}": message
        for words, message in {
            "data.train=[]": "data.train = []: lists no files; set data.train=[FOLDER]",
            "data.tokenizer=null": "data.tokenizer = null: is needed to turn text into tokens; set "
            "data.tokenizer={kind:huggingface",
            "validation.every=100": (
                "validation.every = 100: data.kind = stream has no held-out data; set validation.every=0, or set "
                "data.validation or data.holdout"
            ),
            "data.validation=[b] data.holdout=0.1": (
                "data.holdout = 0.1: needs data.validation = [], got [b]; use 0, or set data.validation=[]"
            ),
            "data.weights=[1,2]": (
                "data.weights = [1.0, 2.0]: needs one weight for each entry of data.train, 1 in all; set "
                "data.weights=null to sample as one source"
            ),
            "data.weights=[0]": "data.weights[0] = 0.0: must be above 0",
            "data.packing.method=best_fit data.packing.index=x": (
                "data.packing.index = x: only packed samples of indexed files have an index; use null"
            ),
        }.items()
    },
    "memory.offload=[optimizer,optimizer]": (
        "memory.offload = [optimizer, optimizer]: has duplicate entries; use [optimizer]"
    ),
    "memory.offload=[parameters]": (
        "memory.offload = [parameters]: parallel.zero = 0 keeps all parameters on the device; use [optimizer], or set "
        "parallel.zero=3"
    ),
    "optimizer=muon optimizer.moments=bf16 optimizer.momentum=0.999": (
        "optimizer.momentum = 0.999: bf16 moments have 8 bits of precision"
    ),
    "optimizer=muon optimizer.adjust_lr=spectral": (
        "optimizer.adjust_lr = 'spectral': must be match_rms_adamw or original"
    ),
    "optimizer=muon metrics.trust_ratios=true": (
        "metrics.trust_ratios = true: needs optimizer.name = lamb, got muon; use false, or set optimizer=lamb"
    ),
    "optimizer=muon optimizer.qk_clip=100 model.qk_norm=true": (
        "optimizer.qk_clip = 100.0: needs model.qk_norm = false, got true: norms already bound the logits; use null"
    ),
    "optimizer=muon optimizer.qk_clip=0": "optimizer.qk_clip = 0.0: must be above 0",
    "optimizer=lamb optimizer.moments=bf16": (
        "optimizer.betas[1] = 0.999: bf16 moments have 8 bits of precision, so a decay of less than 1/256 per step has "
        "no effect; use 0.99, or set optimizer.moments=fp32"
    ),
    "precision=fp64 optimizer.moments=bf16": (
        "optimizer.moments = bf16: needs precision.compute != fp64, got fp64: too coarse; use fp32, or set"
    ),
    "precision=fp64 precision.reduce=bf16": (
        "precision.reduce = bf16: needs precision.compute != fp64, got fp64: too coarse; use fp32, or set"
    ),
    "metrics.trust_ratios=true": "metrics.trust_ratios = true: needs optimizer.name = lamb, got adam; use "
    "false, or set optimizer=lamb",
    **{
        f"model.kind=gpt model.positions=rope {LATENT} {words}": message
        for words, message in {
            "model.kind=pangu": "model.kind = pangu: needs model.latent = null, got {kv_rank: 6, ",
            "model.head_dim=16": "model.head_dim = 16: needs model.latent = null, got {kv_rank: 6, ",
            "model.qk_norm=true": "model.qk_norm = true: needs model.latent = null, got {kv_rank: 6, ",
            "model.latent.rope_head_dim=3": "model.latent.rope_head_dim = 3: must be even: they rotate in pairs; use 4",
            "model.latent.value_head_dim=13": (
                "model.latent.value_head_dim = 13: must be at most model.latent.nope_head_dim + "
                "model.latent.rope_head_dim = 12; use 8"
            ),
            "precision=bf16 precision.matmul=fp8": "model.latent.kv_rank = 6",
        }.items()
    },
    "model.positions=rope model.rope_base=1 model.rope_scaling={name:yarn,factor:2,original_sequence:8}": (
        "model.rope_base = 1.0: must be above 1 with YaRN"
    ),
    "model.positions=rope model.rope_scaling={name:yarn,factor:2,original_sequence:8,mscale_all_dim:1}": (
        "model.rope_scaling.mscale_all_dim = 1.0: needs model.latent != null, got null; use 0, or set model.latent"
    ),
    "model.heads=7": "model.heads = 7: must divide model.hidden = 128; nearest valid values: 2, 4, 8",
    "model.rope_base=500": (
        "model.rope_base = 500.0: needs model.positions = rope, got learned; use null, or set model.positions=rope"
    ),
    "model.head_dim=0": "model.head_dim = 0: must be at least 1",
    "model.positions=rope model.head_dim=7": "needs an even head size, got model.head_dim = 7",
    "model.biases=keys": "model.biases = 'keys': must be true, false, attention or qkv",
    "model.rope_scaling={factor:8,low_freq_factor:1,high_freq_factor:4,original_sequence:64}": (
        "needs model.positions = rope, got learned; use null, or set model.positions=rope"
    ),
    (
        "model.positions=rope "
        "model.rope_scaling={factor:8,low_freq_factor:1,high_freq_factor:4,original_sequence:64} "
        "model.rope_scaling.factor=0.5"
    ): "model.rope_scaling.factor = 0.5: must be at least 1",
    (
        "model.positions=rope "
        "model.rope_scaling={factor:8,low_freq_factor:1,high_freq_factor:4,original_sequence:64} "
        "model.rope_scaling.high_freq_factor=1"
    ): "model.rope_scaling.high_freq_factor = 1.0: must be above model.rope_scaling.low_freq_factor = 1",
    "data.packing.stop=[3,99999]": "data.packing.stop = [3, 99999]: must be ids below model.vocab = 1024",
    "model.positions=alibi model.rope_base=500": "model.rope_base = 500.0: needs model.positions = rope, "
    "got alibi; use null, or set model.positions=rope",
    "model.relative_buckets=8": (
        "model.relative_buckets = 8: needs model.positions = relative, got learned; use null, or set "
        "model.positions=relative"
    ),
    "model.relative_distance=8": "model.relative_distance = 8: needs model.positions = relative, got learned",
    "model.positions=relative model.relative_buckets=1": "model.relative_buckets = 1: must be at least 2",
    "model.positions=relative model.relative_distance=16": (
        "model.relative_distance = 16: must be above 16: half of the 32 buckets hold one distance each; use 128"
    ),
    "model.window=0": "model.window = 0: must be at least 1",
    "model.sparse={kind:fixed,block:16,local_blocks:2,global_blocks:3}": (
        "model.sparse.global_blocks = 3: must not exceed model.sparse.local_blocks = 2; use 1"
    ),
    "model.sparse={kind:strided,block:0,local_blocks:2,stride:3}": "model.sparse.block = 0: must be at least 1",
    "model.sparse={kind:fixed,block:16,local_blocks:2,global_blocks:1,stride:3}": (
        "model.sparse.stride = 3: does not exist with model.sparse.kind = fixed; set model.sparse.kind=strided, which "
        "has it"
    ),
    "model.sparse=fixed": "model.sparse = fixed: must be a group of keys or null; set model.sparse.kind=fixed or ",
    "model.sparse={kind:strided,block:16,local_blocks:2,stride:3} model.attention=flash precision=bf16": (
        "model.attention = flash: cannot skip the blocks of model.sparse.kind = strided; use flex or sdpa, or set "
        "model.attention=auto"
    ),
    "model.attention=sdpa model.residual_scores=true": (
        "model.attention = sdpa: does not return the scores that model.residual_scores=true passes on; use reference, "
        "or set model.attention=auto"
    ),
    "model.attention=cudnn precision=bf16 train.deterministic=true": (
        "model.attention = cudnn: is not deterministic (its sums vary in order), and train.deterministic = true; set "
        "model.attention=auto or train.deterministic=false"
    ),
    "model.attention=flex model.hidden=128 train.deterministic=true": (
        "model.attention = flex: is not deterministic (its sums vary in order), and train.deterministic = true; "
    ),
    "model.attention=flex model.heads=16": (
        "model.attention = flex: needs a head size from 16 to 256, got model.hidden / model.heads = 8"
    ),
    "model.attention=flash_attn": (
        "model.attention = flash_attn: does not support precision.compute = fp32; set precision=bf16 or fp16"
    ),
    "model.attention=flash precision=bf16 model.hidden=36 model.heads=3": (
        "model.attention = flash: needs a head size that is a multiple of 8, got model.hidden / model.heads = 12"
    ),
    "model.attention=flash_attn precision=bf16 model.positions=relative": (
        "model.attention = flash_attn: does not support the attention bias of model.positions = relative"
    ),
    "model.positions=rope model.rope_base=0": "model.rope_base = 0.0: must be above 0",
    "model.positions=rope model.heads=128": (
        "model.positions = rope: needs an even head size, got model.hidden / model.heads = 1"
    ),
    "model.positions=rope model.partial_rotary_factor=0.5 model.heads=256": "model.heads = 256: must divide model.hidd",
    "model.kv_heads=0": "model.kv_heads = 0: must be at least 1",
    "model.kv_heads=3": "model.kv_heads = 3: must divide model.heads = 8; nearest valid values: 1, 2, 4",
    "parallel.overlap_chunks=0": "parallel.overlap_chunks = 0: must be at least 1",
    "parallel.overlap_chunks=4": (
        "parallel.overlap_chunks = 4: has no communication to overlap with parallel.tensor = 1; use 1, or a larger"
    ),
    "model.layers=0": "model.layers = 0: must be at least 1",
    "model.layers=1": "model.layers = 1: PanGu-α needs at least one layer below its query layer",
    "model.kind=gpt model.final_norm=after_query": "model.final_norm = after_query: needs model.kind = pangu, got gpt",
    "model.dropout=1": "model.dropout = 1.0: must be at least 0 and below 1",
    "batch.micro_size=3": (
        "batch.global_size = 16: must be a multiple of batch.micro_size x data-parallel size = 3 x 1 = 3; nearest "
        "valid values: 15, 18; or set batch.micro_size to 1, 2 or 4"
    ),
    "batch.micro_size=0": "batch.micro_size = 0: must be at least 1",
    "precision.compute=fp16": "precision.compute = fp16: precision.loss_scale",
    "precision=bf16 precision.fp32_matmul=high": "precision.fp32_matmul = high: needs precision.compute = fp32, got",
    "precision=fp16 precision.matmul=fp8": (
        "precision.matmul = fp8: needs precision.compute != fp16, got fp16: scales conflict; use compute, or set"
    ),
    "precision=fp8 model.hidden=72 batch.micro_size=1 model.sequence=24": (
        "precision.matmul = fp8: needs multiples of 16: model.hidden = 72, the queries' width = 72, batch.micro_size x "
        "model.sequence = 24; set precision=bf16"
    ),
    "precision=fp16 precision.compute=bf16": "precision.compute = bf16: precision.loss_scale",
    "precision=fp16 precision.loss_scale.initial=0.5": "precision.loss_scale.initial = 0.5: must be at least "
    "precision.loss_scale.minimum = 1; use e.g. 65536",
    "optimizer.lr=0": "optimizer.lr = 0.0: must be above 0",
    "optimizer.lr=nan": "optimizer.lr = nan: must be a finite number",
    "optimizer.betas=[0.9,1]": "optimizer.betas[1] = 1.0: must be at least 0 and below 1",
    "optimizer=lamb optimizer.max_ratio=0": "optimizer.max_ratio = 0.0: must be above 0",
    "lr_schedule.min_lr=1": "lr_schedule.min_lr = 1.0: must not exceed optimizer.lr",
    "lr_schedule=constant lr_schedule.decay_steps=5": "lr_schedule.decay_steps = 5: needs lr_schedule.shape != "
    "constant, got constant; use null, or set lr_schedule=cosine",
    "lr_schedule=inverse_sqrt lr_schedule.decay_steps=5": "lr_schedule.decay_steps = 5: needs lr_schedule.shape "
    "!= inverse_sqrt, got inverse_sqrt; use null, or",
    "loss.mtp_weight=0.3": "loss.mtp_weight = 0.3: needs model.mtp_layers > 0, got 0; use 0.1, or set "
    "model.mtp_layers=1",
    "lr_schedule.decay_shape=cosine": "lr_schedule.decay_shape = cosine: needs lr_schedule.shape = wsd, "
    "got cosine; use linear, or set lr_schedule=wsd",
    "precision=fp16 precision.loss_scale.consecutive=true": "precision.loss_scale.consecutive = true: needs "
    "precision.loss_scale.hysteresis > 1, got 1; use false, or a larger",
    "weight_decay_schedule={start:0,shape:cubic}": "weight_decay_schedule.shape = 'cubic': must be linear or cosine",
    "lr_schedule=wsd lr_schedule.decay_steps=999": "must not exceed train.steps = 300",
    "lr_schedule.decay_steps=99": "lr_schedule.warmup_steps = 100: must not exceed lr_schedule.decay_steps = 99",
    "data.packing.eod=4096": "data.packing.eod = 4096: must be an id below model.vocab",
    "data.packing.eod=6": "data.packing.eod = 6: must differ from data.packing.pad = 6",
    "data.packing.eod=null": "data.packing.eod = null: is required if data.packing.reset_mask",
    "data.packing.method=best_fit data.packing.eod=null": (
        "data.packing.eod = null: data.packing.method = best_fit needs the end-of-document id; set an id, or "
        "data.packing.method=concat"
    ),
    "data=synthetic validation.every=0 data.packing.method=single": (
        "data.packing.method = single: data=synthetic has no documents; use concat"
    ),
    "data.packing.index=x": "data.packing.index = x: only packed samples of indexed files have an index; use null",
    "data=instructions validation.every=0 data.tokenizer={kind:bytes}": (
        "data.train = []: lists no files; set data.train=[FILE.jsonl], with one conversation per line"
    ),
    "data=instructions validation.every=0 data.train=[x]": (
        "data.tokenizer = null: is needed to turn text into tokens; set data.tokenizer={kind:huggingface,path:FOLDER}"
    ),
    "data=instructions validation.every=0 data.train=[x] data.tokenizer={kind:bytes} data.packing.method=concat": (
        "data.packing.method = concat: would split conversations; use best_fit or single"
    ),
    "model.vocab=100": "model.vocab = 100: is too small for the tokenizer of data=stdlib; use 512 or more",
    "data=indexed validation.every=0": "data.train = []: lists no files",
    "data=synthetic": "validation.every = 100: data.kind = synthetic has no held-out data",
    "data=synthetic validation.every=0 sample.tokens=5 sample.prompts=[x]": (
        "sample.tokens = 5: data.kind = synthetic has no tokenizer"
    ),
    "memory.recompute=5": (
        "memory.recompute = 5: must be none, selective, full or a number of layers up to model.layers = 4"
    ),
    "memory.recompute=selective memory.selective=[]": "memory.selective = []: lists nothing",
    "memory.offload=[activations] model.kind=gpt model.layers=1": (
        "memory.offload = [activations]: the last layer of a chunk is not offloaded, and no chunk of model.layers = 1"
    ),
    "parallel.sequence=true": "parallel.sequence = true: needs parallel.tensor > 1",
    "loss.chunk=0": "loss.chunk = 0: must be at least 1",
    "train.steps=0": "train.steps = 0: must be at least 1",
    "checkpoint.keep_every=150": (
        "checkpoint.keep_every = 150: must be a multiple of checkpoint.every = 100; nearest valid values: 100, 200"
    ),
    "checkpoint.keep_best=1 validation.every=0": (
        "checkpoint.keep_best = 1: needs checkpoints of validated steps: checkpoint.every = 100, validation.every = 0"
    ),
    "checkpoint.keep_best=2 validation.every=150": (
        "checkpoint.keep_best = 2: needs checkpoints of validated steps: checkpoint.every = 100, validation.every = 150"
    ),
    "checkpoint.keep_every_hours=0": "checkpoint.keep_every_hours = 0.0: must be above 0",
    "checkpoint.resume=a checkpoint.init_from=b": (
        "checkpoint.init_from = b: checkpoint.resume = a already provides the weights"
    ),
    "faults.max_rollbacks=0": "faults.max_rollbacks = 0: must be at least 1",
    "faults.spike=0": "faults.spike = 0.0: must be above 0",
    "faults.straggler_factor=1": "faults.straggler_factor = 1.0: must be above 1",
    "faults.action=rollback checkpoint.every=0": (
        "faults.action = rollback: checkpoint.every = 0 saves no checkpoint to roll back to; use stop"
    ),
    "train.check_replicas=-1": "train.check_replicas = -1: must be at least 0",
    "train.stop_after=soon": "train.stop_after = soon: must be a duration; use e.g. 5400, 90m, 1h30m or null",
    "train.stop_after=0": "train.stop_after = 0.0: must be above 0",
    "train.stop_after=1h checkpoint.every=0": (
        "train.stop_after = 1h: needs checkpoint.every > 0, got 0: nothing to resume; use null, or set"
    ),
    "data=indexed data.train=[a,b] data.weights=[1] validation.every=0": (
        "data.weights = [1.0]: needs one weight for each entry of data.train, 2 in all; set"
    ),
    "data=indexed data.train=[a,b] data.weights=[1,-1] validation.every=0": (
        "data.weights[1] = -1.0: must be at least 0"
    ),
    "data=indexed data.train=[a,b] data.weights=[0,0] validation.every=0": (
        "data.weights = [0.0, 0.0]: at least one weight must be above 0"
    ),
    "data=indexed data.train=[a] data.weight_schedule=[{sample:9,weights:[1,1]}] validation.every=0": (
        "data.weight_schedule[0].weights = [1.0, 1.0]: needs one weight for each entry of data.train, 1 in all; add "
        "or remove weights"
    ),
    (
        "data=indexed data.train=[a] data.weight_schedule=[{sample:9,weights:[1]},{sample:9,weights:[2]}] "
        "validation.every=0"
    ): "data.weight_schedule = [9, 9]: `sample` must increase from one entry to the next",
    "evaluate.every=-1": "evaluate.every = -1: must be at least 0",
    "evaluate.shots=-1": "evaluate.shots = -1: must be at least 0",
    "evaluate.limit=0": "evaluate.limit = 0: must be at least 1",
    "evaluate.every=1 evaluate.data=x": (
        "evaluate.tasks = []: lists no task; set evaluate.every=0, or e.g. evaluate.tasks=[lambada]"
    ),
    "evaluate.every=1 evaluate.tasks=[c3]": (
        "evaluate.data = null: must be the folder that holds the tasks' files; set it, or set evaluate.every=0"
    ),
    "data=synthetic validation.every=0 evaluate.every=2 evaluate.tasks=[c3] evaluate.data=x": (
        "evaluate.every = 2: data.kind = synthetic has no tokenizer; set evaluate.every=0"
    ),
    "sample.tokens=5": "sample.prompts = []: sample.tokens > 0 needs a prompt to continue",
}
"""Command line -> what is said of it, and nothing else."""


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_one_contradiction(words: str) -> None:
    text = problems(*words.split())
    assert text.startswith("1 problem in the configuration:"), text
    assert CONTRADICTIONS[words] in text


UPCYCLING = {
    "checkpoint.upcycle=true": (
        "checkpoint.upcycle = true: needs checkpoint.init_from != null, got null; use false, or set "
        "checkpoint.init_from=CHECKPOINT\n  checkpoint.upcycle = true: needs model.experts != null"
    ),
    (
        "model.experts=8 checkpoint.upcycle=true checkpoint.init_from=a model.router.normalised=false "
        "model.router.scale=2.5"
    ): (
        "model.router.normalised = false: with checkpoint.upcycle = true the weights of a token's experts must add up "
        "to 1; use true\n  model.router.scale = 2.5: with checkpoint.upcycle = true"
    ),
    "model.experts=8 checkpoint.upcycle=true checkpoint.init_from=a model.shared_experts=1 model.expert_ffn=64": (
        "model.shared_experts = 1: with checkpoint.upcycle = true shared experts would add to the output of the "
        "copies; use 0\n  model.expert_ffn = 64: with checkpoint.upcycle = true each expert is a copy of a dense layer "
        "of 512 columns; use null"
    ),
}
"""Command line -> what is said of experts that copy dense layers."""


@pytest.mark.parametrize("words", UPCYCLING)
def test_experts_that_would_not_compute_as_the_dense_layers_they_copy(words: str) -> None:
    assert UPCYCLING[words] in problems(*words.split())


def test_all_contradictions_at_once() -> None:
    text = problems(
        "model.heads=7", "batch.micro_size=3", "optimizer.lr=-1", "train.steps=0", "lr_schedule.warmup_steps=0"
    )
    assert text.startswith("4 problems")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_passes_a_dry_run_on_one_process(recipe: str) -> None:
    chosen = config(f"+config={recipe}", "dry_run=true")
    parallel = chosen.parallel
    # the replicas of one pipeline stage and tensor slice hold an expert each, or as much of it as the slice
    assert check(chosen, 1) == max(1, parallel.expert * (parallel.expert_tensor or parallel.tensor) // parallel.tensor)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=inf", "optimizer.lr = inf: must be a finite number"),
        # 0 in single precision, and 0 / 0 in the update of a weight without a gradient
        ("optimizer.eps=1e-300", "optimizer.eps = 1e-300: must be a number of at least 1.175494351e-38"),
        ("optimizer.clip=inf", "optimizer.clip = inf: must be a finite number; use null"),
        ("sample.temperature=.inf", "sample.temperature = inf: must be a finite number"),
        (
            "optimizer.weight_decay=1e300",
            "optimizer.weight_decay = 1e+300: must be a number of at most 3.4028",
        ),
        ("parallel.timeout_s=1e30", "parallel.timeout_s = 1e+30: must be above 0 and at most 1000000000"),
        (
            "faults.spike_window=1e22",
            "faults.spike_window = 10000000000000000000000: must be at least 2 and at",
        ),
        ("loss.chunk=1e22", "loss.chunk = 10000000000000000000000: must be at least 1 and at most 2147483647"),
        ("model.window=1e22", "model.window = 10000000000000000000000: must be at least 1 and at most 2147483647"),
        ("model.hidden=4000000000", "model.hidden = 4000000000: must be at least 1 and at most 1048576"),
        ("model.vocab=10000000000000000000", "model.vocab = 10000000000000000000: must be at least 1 and at most 2147"),
        ("model.layers=1000000", "model.layers = 1000000: must be at least 1 and at most 1000"),
        (
            "batch.global_size=100000000",
            "batch.global_size = 100000000: makes 25,000,000 micro-batches in a step, more than 32,768; use 131",
        ),
        ("checkpoint.resume=''", "checkpoint.resume = '': must not be empty"),
        ("train.output=' '", "train.output =  : must not be empty"),
        (
            "train.output=s3://b/run",
            "train.output = s3://b/run: s3:// is not supported, only folders mounted on this "
            "machine; use a path such as b/run",
        ),
        (
            "train.output=HDFS://b/run",
            "train.output = HDFS://b/run: HDFS:// is not supported, only folders mounted on "
            "this machine; use a path such as b/run",
        ),
        (
            "checkpoint.remote=b/run",
            "checkpoint.remote = b/run: must be a URL; use e.g. s3://BUCKET/RUN, or file://b/run",
        ),
        (
            "checkpoint.remote=file://runs/x/../default",
            "is the same folder as train.output; use another folder, or null",
        ),
        (
            "checkpoint.resume='gs://b/c'",
            "checkpoint.resume = gs://b/c: gs:// is not supported, only folders mounted "
            "on this machine; use a path such as b/c",
        ),
        (
            "checkpoint.init_from=file:///c",
            "checkpoint.init_from = file:///c: file:// is not supported, only folders "
            "mounted on this machine; use a path such as /c",
        ),
        ("parallel.sequence=null", "parallel.sequence = null: must be true or false"),
        ("evaluate.tasks=[nope]", "evaluate.tasks[0] = 'nope': must be afqmc, cmnli,"),
        ("parallel.layouts=[3]", "parallel.layouts[0] = 3: must be a group of keys"),
        ("parallel.layouts=3", "parallel.layouts = 3: must be a list of groups of keys or null"),
        (
            "optimizer.max_ratio=2",
            "does not exist with optimizer.name = adam; set optimizer=lamb, which has it",
        ),
        ("model.layer=2", "model.layer = 2: unknown key; did you mean model.layers?"),
        ("train.layers=2", "train.layers = 2: unknown key; did you mean model.layers or parallel.layers?"),
    ],
)
def test_one_wrong_value(override: str, expected: str) -> None:
    key, _, text = override.partition("=")
    values = composed()
    group, _, last = key.partition(".")
    values[group][last] = OmegaConf.create(f"x: {text}").x if text != "' '" else " "
    if isinstance(values[group][last], ListConfig):
        values[group][last] = list(values[group][last])
    checked, found = find_problems(values)
    said = str(ConfigError(found + layout_problems(checked, 1)))
    assert said.startswith("1 problem in the configuration:"), said
    assert expected in said


def test_a_missing_group_is_one_problem() -> None:
    values = composed()
    for group in [key for key, value in values.items() if isinstance(value, dict)]:
        _, found = find_problems({key: value for key, value in values.items() if key != group})
        assert [*map(str, found)] in ([], [f"{group} = (missing): is required: a group of keys"])


def test_wrong_values_and_contradictions_of_others_are_told_together() -> None:
    values = composed("model.heads=8", "parallel.sequence=true", "parallel.tensor=3", "model.hidden=96")
    values["model"]["layer"], values["train"]["steps"], values["optimizer"]["lr"] = 3, "many", -1
    checked, found = find_problems(values)
    found += layout_problems(checked, 3)
    assert [str(problem) for problem in found] == [
        "model.layer = 3: unknown key; did you mean model.layers?",
        "optimizer.lr = -1.0: must be above 0",
        "train.steps = 'many': must be an integer",
        "parallel.tensor = 3: must divide model.heads = 8 and model.sequence = 128; nearest valid values: 2, 4",
    ]


@pytest.mark.parametrize("key", ["data.packing.index", "model.full_layers", "model.nope_layers"])
def test_nothing_more_is_said_of_a_value_that_is_wrong_or_contains_one(key: str) -> None:
    values = composed()
    *groups, name = key.split(".")
    group = values
    for one in groups:
        group = group[one]
    group[name] = [{"a": 1}]
    _, found = find_problems(values)
    assert [problem.rule.partition(" ")[0] for problem in found] == ["must"], [*map(str, found)]


def test_the_configuration_knows_every_task() -> None:
    assert get_args(TaskName) == tuple(TASKS)
