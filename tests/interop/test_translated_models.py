"""Models that tools/translate_config.py keeps as they are, or refuses to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pangu.config.rope import YarnScaling
from pangu.interop.formats.megatron_experts import expert_interval, layer_pattern
from pangu.interop.translation.launch_script import read_command
from pangu.models.size import num_parameters
from tests.configs import config as composed_config
from tests.interop.test_translate_config import GPT, built, overrides, section, translate

LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
LLAMA += "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 64"
ASCEND = f"""
NPUS_PER_NODE=16; NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
# please fill these path configurations
CKPT_SAVE_DIR="your model save ckpt path"
DATA_PATH="your data path"
TOKENIZER_PATH="/path/to/tokenizer"
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $NNODES
"
MOE_ARGS=(
    "--num-experts 16"
    "--moe-router-topk 4"
    "--moe-intermediate-size 96 --n-shared-experts 1 --first-k-dense-replace 1 --moe-layer-freq -1"
    "--norm-topk-prob --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --seq-aux"
)
GPT_ARGS="
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm --kv-channels 32
    --num-layers 8 --noop-layers 6,7 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 64 --padded-vocab-size 1000 --rotary-base 1000000
    --rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1 --high-freq-factor 4
    --original-max-position-embeddings 8192 --rotary-percent 1.0 {LLAMA}
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ${{TOKENIZER_PATH}}
    --use-fused-swiglu --use-fused-rmsnorm --reuse-fp32-param --no-shared-storage --handler-name GeneralPretrainHandler
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS ${{MOE_ARGS[@]}} $OUTPUT_ARGS \\
    --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 \\
    --sequence-parallel --micro-batch-size 1 --global-batch-size 64 --lr 1e-3 --min-lr $7 --train-iters 10 --bf16 \\
    --lr-decay-style cosine --data-path $DATA_PATH --save $CKPT_SAVE_DIR 2>&1 | tee logs/train.log
"""


def test_a_script_of_mindspeed_keeps_its_model(tmp_path: Path) -> None:
    (tmp_path / "pretrain_qwen3.sh").write_text(ASCEND)
    done = translate("megatron", tmp_path / "pretrain_qwen3.sh")
    assert {"data.train=???", "data.tokenizer=???", "train.output=???", "lr_schedule.min_lr=???"} < {*overrides(done)}
    assert "lr_schedule.min_lr: --min-lr is $7" in section(done, "to be given")
    assert "OUTPUT_ARGS: set it with NAME=VALUE" in section(done, "not set there, treated as empty")
    given = ("data.train=[/d]", "data.tokenizer=null", "train.output=runs/x", "lr_schedule.min_lr=1e-5")
    config = built(done, *given)
    model, parallel = config.model, config.parallel
    assert (model.layers, model.kv_heads, model.head_dim, model.qk_norm, model.rope_base) == (6, 2, 32, True, 1e6)
    assert (model.experts, model.expert_ffn, model.shared_experts, model.dense_layers) == (16, 96, 1, 1)
    assert (model.router.normalised, model.router.balance, model.router.balance_weight) == (True, "sequence", 0.001)
    assert model.rope_scaling is not None
    assert (parallel.data, parallel.tensor, parallel.pipeline, parallel.expert) == (8, 2, 2, 8)
    attention, expert, norms = 64 * 128 * 2 + 64 * 64 * 2, 3 * 64 * 96, 2 * 64 + 2 * 32
    experts = 64 * 16 + (16 + 1) * expert
    assert num_parameters(model) == 2 * 1000 * 64 + 6 * (attention + norms) + 3 * 64 * 192 + 5 * experts + 64
    assert "processes: 32\n" in done.stdout


LLAMA_LIKE = """
    --use-mcore-models --tokenizer-type PretrainedFromHF --tokenizer-name-or-path $TOKENIZER_PATH --seq-length 4096
    --micro-batch-size 1 --global-batch-size 64 --lr 1e-5 --train-iters 2000 --bf16 --position-embedding-type rope
    --use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention
    --attention-dropout 0.0 --hidden-dropout 0.0 --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu
    --use-fused-rmsnorm --transformer-impl local --no-masked-softmax-fusion --attention-softmax-in-fp32
"""
QWEN3_SPEC = "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm --norm-epsilon 1e-6 "
QWEN3_SPEC += (
    "--rotary-base 1000000 --padded-vocab-size 151936 --untie-embeddings-and-output-weights --kv-channels 128 "
)
MINDSPEED = {
    "openpangu_1b": (
        "--num-layers 26 --hidden-size 1536 --ffn-hidden-size 6144 --num-attention-heads 12 --num-query-groups 6 "
        "--kv-channels 128 --padded-vocab-size 153376 --add-qkv-bias --add-dense-bias --rotary-base 4000000",
        1_155_912_192,
    ),
    "qwen3_8b": (
        QWEN3_SPEC + "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 "
        "--num-query-groups 8",
        8_190_735_360,
    ),
    "qwen3_30b_a3b": (
        QWEN3_SPEC + "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
        "--num-query-groups 4 --num-experts 128 --moe-router-topk 8 --moe-intermediate-size 768 --norm-topk-prob "
        "--moe-layer-freq -1 --first-k-dense-replace -1 --moe-grouped-gemm --moe-permutation-async-comm "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type softmax_topk --seq-aux "
        "--moe-aux-loss-coeff 0.001",
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("preset", MINDSPEED)
def test_a_model_of_mindspeed_has_its_published_size(tmp_path: Path, preset: str) -> None:
    """It is the preset's, but for how it is trained."""
    words, parameters = MINDSPEED[preset]
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {' '.join(LLAMA_LIKE.split())} {words}")
    model = built(translate("megatron", tmp_path / "run.sh"), "data.tokenizer=null", "data.train=[/d]").model
    assert num_parameters(model) == parameters
    ours = composed_config(f"+config={preset}").model
    trained = {"sequence", "attention", "init_std", "scaled_init", "router", "head_dim"}
    assert {name for name, value in vars(model).items() if getattr(ours, name) != value} <= trained
    assert model.head_size == ours.head_size


LATENT = """
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path $TOKENIZER_PATH --micro-batch-size 1 --seq-length 4096
    --global-batch-size 64 --lr 1e-5 --train-iters 2000 --bf16 --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --norm-epsilon 1e-6 --qk-layernorm --kv-lora-rank 512 --v-head-dim 128 --rotary-base 10000 --moe-grouped-gemm
"""
DEEPSEEKS = {
    # MindSpeed-LLM; three of 64 layers fill the stages of its pipeline
    "DeepSeek-V3": (
        "--multi-head-latent-attention --qk-rope-head-dim 64 --qk-nope-head-dim 128 --q-lora-rank 1536 "
        "--num-layers 64 --noop-layers 47,62,63 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--padded-vocab-size 129280 --first-k-dense-replace 3 --moe-layer-freq 1 --n-shared-experts 1 "
        "--num-experts 256 --moe-router-topk 8 --moe-intermediate-size 2048 --moe-router-load-balancing-type noaux_tc "
        "--n-group 8 --topk-group 4 --routed-scaling-factor 2.5 --norm-topk-prob --seq-aux "
        "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --num-nextn-predict-layers 1 "
        "--share-mtp-embedding-and-output-weight --recompute-mtp-layer --rope-scaling-beta-fast 32 "
        "--rope-scaling-beta-slow 1 --rope-scaling-factor 40 --rope-scaling-mscale 1.0 "
        "--rope-scaling-mscale-all-dim 1.0 --rope-scaling-original-max-position-embeddings 4096 "
        "--rope-scaling-type yarn",
        671_026_404_352,
    ),
    "DeepSeek-V2-Lite in MindSpeed's names": (
        "--multi-head-latent-attention --qk-rope-head-dim 64 --qk-nope-head-dim 128 --num-layers 27 "
        "--hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --padded-vocab-size 102400 "
        "--num-experts 64 --first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 2 --moe-router-topk 6 "
        "--moe-intermediate-size 1408 --moe-router-load-balancing-type pai_megatron_aux_loss --topk-group 1 "
        "--moe-aux-loss-coeff 0.01 --routed-scaling-factor 1.0 --seq-aux --rope-scaling-beta-fast 32 "
        "--rope-scaling-beta-slow 1 --rope-scaling-factor 40 --rope-scaling-mscale 0.707 "
        "--rope-scaling-mscale-all-dim 0.707 --rope-scaling-original-max-position-embeddings 4096 "
        "--rope-scaling-type yarn --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec",
        15_706_484_224,
    ),
    # Megatron-LM
    "DeepSeek-V2-Lite": (
        "--multi-latent-attention --kv-channels 16 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --num-layers 27 "
        "--hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --padded-vocab-size 102400 "
        "--num-experts 64 --moe-layer-freq ([0]+[1]*26) --moe-ffn-hidden-size 1408 --moe-router-topk 6 "
        "--moe-router-pre-softmax --moe-shared-expert-intermediate-size 2816 --moe-aux-loss-coeff 1e-3 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor 1.0 --rotary-percent 1.0 "
        "--rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707 --no-rope-fusion",
        15_706_484_224,
    ),
}


@pytest.mark.parametrize("name", DEEPSEEKS)
def test_latent_attention_keeps_its_published_size(tmp_path: Path, name: str) -> None:
    words, parameters = DEEPSEEKS[name]
    (tmp_path / "run.sh").write_text(f'MODEL="{words}"; torchrun pretrain_gpt.py {" ".join(LATENT.split())} $MODEL')
    model = built(translate("megatron", tmp_path / "run.sh"), "data.tokenizer=null", "data.train=[/d]").model
    assert num_parameters(replace(model, mtp_layers=0)) == parameters
    assert isinstance(model.rope_scaling, YarnScaling)
    assert (model.rope_scaling.factor, model.rope_scaling.attention_factor) == (40, 1)
    assert model.latent is not None
    if name != "DeepSeek-V3":
        assert (model.router.normalised, model.router.balance) == (False, "sequence")
    else:
        ours = composed_config("+config=deepseek_v3_671b").model
        trained = {
            "sequence",
            "attention",
            "init_std",
            "scaled_init",
            "rope_scaling",
            "rope_base",
            "mtp_layers",
            "router",
        }
        assert {name for name, value in vars(model).items() if getattr(ours, name) != value} <= trained
        assert replace(model.router, balance_weight=0.01) == replace(ours.router, balance_weight=0.01)
        assert model.mtp_layers == 1


def test_layers_without_windows_and_rotation_keep_their_places() -> None:
    words = "--use-rotary-position-embeddings --window-size (127,0) --window-attn-skip-freq 2 --no-rope-freq 4"
    done = translate("megatron", *GPT, *words.split(), "--softmax-type", "learnable")
    assert {"model.window=128", "model.full_layers=2", "model.nope_layers=4"} < {*overrides(done)}
    assert "model.attention_sinks=true" in overrides(done)
    layers = int(GPT[GPT.index("--num-layers") + 1])
    words = f"--use-rotary-position-embeddings --window-size (127,0) --window-attn-skip-freq [1]*{layers - 1}+[0]"
    done = translate("megatron", *GPT, *words.split(), "--no-rope-freq", f"[1]+[0]*{layers - 1}")
    assert {f"model.full_layers=[{layers - 1}]", "model.nope_layers=[0]"} < {*overrides(done)}


LOST = {
    "latent attention without norms": (
        "--multi-latent-attention --use-rotary-position-embeddings",
        "--multi-latent-attention: latent attention has norms",
    ),
    "vectors of another attention": ("--kv-lora-rank 512", "--kv-lora-rank 512: changes"),
    "a softmax that is off by one": ("--softmax-type off-by-one", "--softmax-type off-by-one: this value has no"),
    "an unscaled rope in scaled attention": (
        "--multi-latent-attention --qk-layernorm --disable-bias-linear --use-rotary-position-embeddings "
        "--rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1",
        "--mscale-all-dim 1: changes",
    ),
    "an interpolated rotary embedding": (
        "--use-rotary-position-embeddings --rotary-seq-len-interpolation-factor 2",
        "--rotary-seq-len-interpolation-factor 2: ",
    ),
    "another scaling of positions": (
        "--use-rotary-position-embeddings --rope-scaling-type yarn",
        "--rope-scaling-type",
    ),
    "biases of the output alone": ("--disable-bias-linear --add-dense-bias", "--add-dense-bias: changes"),
    "another place of a norm": ("--embed-layernorm", "--embed-layernorm: changes what the model computes"),
    "no positions": ("--no-position-embedding", "--no-position-embedding: changes what the model computes"),
    "other layers": ("--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec", "--spec ["),
    "another objective": ("--label-smoothing 0.1", "--label-smoothing 0.1: an objective other"),
    "another optimizer": ("--optimizer sgd", "--optimizer sgd: this value has no counterpart"),
    "an unknown option": ("--gated-delta-net 3", "--gated-delta-net 3: is unknown, and may change the model"),
    "other scores of groups": (
        "--num-experts 16 --moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-group-topk 2: changes",
    ),
    "a router that samples": (
        "--num-experts 4 --moe-router-load-balancing-type sparsemixer_topk",
        "--moe-router-load-balancing-type sparsemixer_topk: changes",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_changes_the_model_is_refused_by_name(name: str) -> None:
    words, says = LOST[name]
    done = translate("megatron", *GPT, *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "--keep-going" in done.stderr
    assert translate("megatron", "--keep-going", *GPT, *words.split()).returncode == 0


KEPT = {
    "--num-key-value-heads 4 --normalization rmsnorm --ds-sequence-parallel-size 1": "model.kv_heads=4",
    "--use-rotary-position-embeddings --rotary-percent 1.0": "",
    "--softmax-type vanilla --rotary-seq-len-interpolation-factor 1": "",
    "--no-position-embedding --use-rotary-position-embeddings": "",
    "--first-k-dense-replace -1 --num-experts 4 --moe-layer-freq -1": "",
    "--fp8-format hybrid --num-experts 4 --bf16": "computed in bf16",
}


@pytest.mark.parametrize("words", KEPT)
def test_what_asks_for_nothing_is_kept(words: str) -> None:
    done = translate("megatron", *GPT, *words.split())
    assert done.returncode == 0, done.stderr
    assert KEPT[words] in done.stdout


OTHER_PROGRAMS = {
    "torchrun --nproc_per_node 8 pretrain_bert.py --num-layers 24 --hidden-size 1024": "pretrain_bert.py",
    "python -u ${HOME}/Megatron-LM/pretrain_t5.py --encoder-num-layers 12": "pretrain_t5.py",
    'CMD="pretrain_mamba.py --hybrid-layer-pattern M*-"\nbash -c "python $CMD"': "pretrain_mamba.py",
}


@pytest.mark.parametrize("script", OTHER_PROGRAMS)
def test_other_programs_are_refused_by_name(tmp_path: Path, script: str) -> None:
    (tmp_path / "run.sh").write_text(script)
    done = translate("megatron", "--keep-going", tmp_path / "run.sh")
    assert done.returncode == 2
    assert f"it starts another program, {OTHER_PROGRAMS[script]}" in done.stderr
    done = translate("megatron", "pretrain_bert.py", "--num-layers", "24")
    assert (done.returncode, "it starts another program, pretrain_bert.py" in done.stderr) == (2, True)


def test_words_are_split_as_bash_splits_them() -> None:
    script = """
    A=("--one 1" "--two" "2 3"); B=(); C=(x y)
    python pretrain_gpt.py ${A[@]} "${A[@]}" ${B[@]} $C "${C[*]}" ${D:-$C} $1 ${2:-"--three"} 2>err.log
    """
    words = read_command(script, "script", {"1": "first"}).words
    split = ["--one", "1", "--two", "2", "3", "--one 1", "--two", "2 3"]
    assert words == [*split, "x", "x y", "x", "first", "--three"]


def test_placeholders_of_older_examples_are_left_open(tmp_path: Path) -> None:
    script = "DATA=<Specify path and file prefix>_text_document\nSAVE=<Specify path>\nDIST=xxx\n"
    words = " ".join(word for word in GPT if word not in ("--data-path", "/data/web"))
    (tmp_path / "run.sh").write_text(f"{script}python pretrain_gpt.py {words} --data-path $DATA --save $SAVE $@")
    done = translate("megatron", tmp_path / "run.sh")
    assert {"data.train=???", "train.output=???"} < {*overrides(done)}
    assert "@: set it with NAME=VALUE" in section(done, "not set there, treated as empty")


COMMAND = "pretrain_gpt.py --num-layers 2"
LAUNCHERS = {
    f"torchrun --nnodes=4 --nproc-per-node 8 {COMMAND}": 32,
    f"python -m torch.distributed.launch --nproc_per_node 8 {COMMAND}": 8,
    f"deepspeed --num_nodes 2 --num_gpus 4 {COMMAND}": 8,
    f"N=3; torchrun --nnodes $N --nproc_per_node $((N*2)) {COMMAND}": 18,
    f"#SBATCH --nodes=16\n#SBATCH --ntasks-per-node=8\nsrun python {COMMAND}": 128,
    f"#SBATCH -N 2\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 {COMMAND}": 8,
    f"torchrun --nnodes $N --nproc_per_node 8 {COMMAND}": None,
    f"torchrun --nnodes 1:4 --nproc_per_node 8 {COMMAND}": None,
    f"python {COMMAND}": None,
}


@pytest.mark.parametrize("script", LAUNCHERS)
def test_processes_are_those_that_the_script_starts(script: str) -> None:
    assert read_command(script, "script", {}).processes == LAUNCHERS[script]


def test_replicas_follow_from_the_nodes_where_they_can(tmp_path: Path) -> None:
    words = [word for word in GPT if word not in ("--global-batch-size", "64")]
    for processes, says in ((8, "processes: 8\n"), (6, "processes: a multiple of 4 (the script starts 6)\n")):
        line = f"torchrun --nproc_per_node {processes} pretrain_gpt.py {' '.join(words)} --tensor-model-parallel-size 4"
        (tmp_path / "run.sh").write_text(line)
        done = translate("megatron", tmp_path / "run.sh")
        assert says in done.stdout
        assert ("batch.global_size=8" in overrides(done)) == (processes == 8)  # micro-batches of 4 on 2 replicas
    (tmp_path / "run.sh").write_text(line.replace("parallel-size 4", "parallel-size $TP").replace(" 6 ", " 8 "))
    words = overrides(translate("megatron", tmp_path / "run.sh"))
    assert "parallel.tensor=???" in words
    assert not any(word.startswith("parallel.data") for word in words)


def test_the_multiple_of_processes_counts_experts() -> None:
    words = "--num-experts 8 --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel"
    assert "processes: a multiple of 16\n" in translate("megatron", *GPT, *words.split()).stdout
    alone = translate("megatron", *GPT, *words.split(), "--expert-tensor-parallel-size", "1")
    assert "processes: a multiple of 8\n" in alone.stdout


QWEN3 = {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
QWEN3 |= {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "swiglu",
    "seq_length": 4096,
}
QWEN3 |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "attention_bias": False}
QWEN3 |= {"position_embedding_type": "rope", "qk_layernorm": True, "add_bias_linear": False, "model_type": "qwen3"}
QWEN3 |= {
    "untie_embeddings_and_output_weights": True,
    "compute_dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"],
}
QWEN3 |= {"offset": [-1, -1, 1, 1], "hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.02}
LLAMA_70B = {"type": "LlamaConfig", "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "n_kv_heads": 8}
LLAMA_70B |= {"vocab_size": 128256, "multiple_of": 256, "ffn_dim_multiplier": 1.3, "seq_length": 8192, "theta": 500000}
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MOE |= {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144}
MOE |= {"num_attention_heads": 32, "num_key_value_heads": 4, "architectures": ["Qwen3MoeForCausalLM"], "offset": 0}
DEEPSEEK = {"type": "DeepseekV3Config", "num_layers": 61, "hidden_size": 7168, "num_heads": 128, "n_kv_heads": 128}
DEEPSEEK |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK |= {"qk_nope_head_dim": 128, "vocab_size": 129280, "intermediate_size": 18432, "rms_norm_eps": 1e-6}
DEEPSEEK |= {"extend_method": "None", "theta": 1e4, "seq_length": 4096, "offset": [0, 0, 0, 1], "mtp_depth": 1}
DEEPSEEK |= {"mtp_loss_factor": 0.3, "expert_num": 256, "num_experts_chosen": 8, "moe_intermediate_size": 2048}
DEEPSEEK |= {"shared_expert_num": 1, "first_k_dense_replace": 3, "norm_topk_prob": True, "use_gating_sigmoid": True}
DEEPSEEK |= {"routed_scaling_factor": 2.5, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.001}
SIZES = {
    "DeepSeek-V3": (DEEPSEEK, 671_026_404_352),
    "Qwen3-32B": (QWEN3, 32_762_123_264),
    "Qwen3-30B-A3B": ({**QWEN3, **MOE}, 30_532_122_624),
    "Llama 3.1 70B": (LLAMA_70B, 70_553_706_496),
}


def mindformers(path: Path, model: dict[str, object], **parts: object) -> Path:
    parallel = {"data_parallel": 4, "model_parallel": 4, "pipeline_stage": 4, "micro_batch_num": 4}
    values = {
        "model": {"model_config": model, **parts},
        "parallel_config": parallel,
        "runner_config": {"batch_size": 1},
    }
    path.write_text(
        yaml.safe_dump({**values, "lr_schedule": {"type": "cosine", "learning_rate": 1e-6, "total_steps": 9}})
    )
    return path


@pytest.mark.parametrize("name", SIZES)
def test_a_model_of_mindformers_has_its_published_size(tmp_path: Path, name: str) -> None:
    model, parameters = SIZES[name]
    parts = {"arch": {"type": "DeepseekV3ForCausalLM"}} if name == "DeepSeek-V3" else {}
    done = translate("mindformers", mindformers(tmp_path / "run.yaml", model, **parts))
    config = built(done, "data.train=[/d]")
    assert num_parameters(replace(config.model, mtp_layers=0)) == parameters
    assert config.model.qk_norm == name.startswith("Qwen3")
    layers = {"Qwen3-32B": (15, 15, 17, 17), "DeepSeek-V3": (15, 15, 15, 16)}
    assert config.parallel.layers == layers.get(name)
    assert (config.model.mtp_layers, config.loss.mtp_weight) == ((1, 0.3) if name == "DeepSeek-V3" else (0, 0.1))


OTHER_MODELS = {
    "latent attention of a Llama": ({**LLAMA_70B, "kv_lora_rank": 512}, {}, "kv_lora_rank 512: changes"),
    "another class": (LLAMA_70B, {"arch": {"type": "DeepseekV3ForCausalLM"}}, "arch.type DeepseekV3ForCausalLM"),
    "YaRN by default": ({**DEEPSEEK, "extend_method": None}, {}, "type DeepseekV3Config: changes"),
    "Baichuan 13B": (LLAMA_70B, {"arch": {"type": "Baichuan13BForCausalLM"}}, "arch.type Baichuan13BForCausalLM"),
    "BERT": ({**LLAMA_70B, "type": "BertConfig"}, {}, "model.model_config.type BertConfig: the known models are"),
    "YaRN": ({**LLAMA_70B, "extend_method": "YARN"}, {}, "extend_method YARN: changes what the model computes"),
    "a gate of another function": ({**LLAMA_70B, "hidden_act": "gelu"}, {}, "hidden_act gelu: this value has no"),
    "an unknown field": ({**LLAMA_70B, "use_magic": 7}, {}, "model.model_config.use_magic 7: is unknown"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_of_mindformers_is_refused(tmp_path: Path, name: str) -> None:
    model, parts, says = OTHER_MODELS[name]
    done = translate("mindformers", mindformers(tmp_path / "run.yaml", model, **parts))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_other_versions_and_models_of_torchtitan_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config_registry.py").write_text("def llama3_8b(): ...\n")
    (tmp_path / "dump.json").write_text(json.dumps({"training": {"steps": 10}}))
    (tmp_path / "train.toml").write_text('[model]\nname = "deepseek_v3"\nflavor = "16B"\n')
    (tmp_path / "qwen3.toml").write_text('[model]\nname = "qwen3"\nflavor = "1.7B"\n')
    text = '[model]\nflavor = "8B"\n[training]\ndataset = "c4"\ndataset_path = "/path/to/c4"\n'
    (tmp_path / "llama3.toml").write_text(text)
    assert "data.train=???" in overrides(translate("torchtitan", tmp_path / "llama3.toml"))
    for name in ("config_registry.py", "dump.json"):
        assert "torchtitan is read up to v0.2.2, whose" in translate("torchtitan", tmp_path / name).stderr
    assert "model.flavor 16B: this value has no counterpart" in translate("torchtitan", tmp_path / "train.toml").stderr
    assert "# 1,720,574,976 parameters" in translate("torchtitan", tmp_path / "qwen3.toml").stdout


def test_layers_with_experts() -> None:
    # layers 0, 2, 4 have experts: every second, but from the first on
    assert expert_interval(layer_pattern(2, 6)) is None
    assert expert_interval(layer_pattern(1, 6, dense=2)) == (2, 1)
    assert expert_interval(layer_pattern("([0]*1+[0,1]*3)", 7)) == (1, 2)
    assert layer_pattern("[1]*9", 7) == []
