"""Rules for interdependent options of Megatron-LM's and MindSpeed-LLM's pretrain_gpt.py."""
# From megatron/training/arguments.py (`validate_args`) and megatron/core/optimizer_param_scheduler.py.

from __future__ import annotations

import re
from pathlib import PurePath

from pangu.config.parallelism import least_data
from pangu.interop.formats.megatron_experts import layer_pattern
from pangu.interop.translation.megatron_attention import attention
from pangu.interop.translation.megatron_recipe import optimizer, schedule
from pangu.interop.translation.table import Translation

_SPECS = ("qwen3_spec", "bailing_spec", "deepseek_spec", "gpt_layer_specs")
"""Modules whose layers are those that the other options describe."""
_BALANCING, _PAI = "moe-router-load-balancing-type", "pai_megatron_aux_loss"


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values that Megatron would not take either."""
    source.set("model", "gpt2_124m")
    source.set_direct()
    if not source.get("model.mtp_layers"):
        source.overrides.pop("loss.mtp_weight", None)
    for rule in (_model, attention, _vocabulary, _experts, _layout, _memory, _precision, optimizer, schedule, _data):
        rule(source)
    if minutes := source.number("exit-duration-in-mins"):
        source.set("train.stop_after", f"{round(minutes)}m", "exit-duration-in-mins")
    if source.is_given(["tensorboard-dir"]):
        source.set("metrics.tensorboard", True, "tensorboard-dir")


def _model(source: Translation) -> None:
    layers = source.integer("num-layers")
    if layers is not None and (skipped := _skipped(source)):
        source.set("model.layers", layers - sum(layer < layers for layer in skipped), "num-layers", "noop-layers")
    if any(spec.rpartition(".")[2] not in _SPECS for spec in source.words("spec")[:1]):
        source.lacks("spec", "other_function")
    gated, plain = source.flag("swiglu"), source.flag("disable-bias-linear")
    if gated:
        source.set("model.activation", "swiglu", "swiglu")
    elif source.flag("squared-relu"):
        source.set("model.activation", "squared_relu", "squared-relu")
    elif source.flag("openai-gelu"):
        source.set("model.activation", "gelu_tanh", "openai-gelu")
    else:
        # the fused kernel is the approximation by tanh; it needs biases
        exact = plain or source.flag("no-bias-gelu-fusion")
        source.set("model.activation", "gelu" if exact else "gelu_tanh", "no-bias-gelu-fusion")
    width, hidden = source.integer("ffn-hidden-size"), source.integer("hidden-size")
    if width is None and gated and hidden is not None:
        width = int(4 * hidden * 2 / 3 / 64) * 64
    if width is not None:
        source.set("model.ffn", width, "ffn-hidden-size", "swiglu")
    if plain:
        queries, output = source.flag("add-qkv-bias"), source.flag("add-dense-bias")
        if output and not queries:
            source.lacks("add-dense-bias", "other_function")
        biases = "attention" if output else "qkv" if queries else False
        source.set("model.biases", biases, "disable-bias-linear")
    source.switch(False, "untie-embeddings-and-output-weights")
    source.choose("normalization")


def _vocabulary(source: Translation) -> None:
    kind = source.text("tokenizer-type")
    if kind is None and source.is_given(["merge-file"]):
        kind = "GPT2BPETokenizer"
    for name in ("pad-vocab-size-to", "padded-vocab-size", "vocab-size"):
        if (size := source.integer(name)) is not None:
            # NullTokenizer adds the end of a document
            source.set("model.vocab", size + (kind == "NullTokenizer" and name == "vocab-size"), name)
            break
    else:
        if kind == "GPT2BPETokenizer":
            source.set("model.vocab", 50257, "tokenizer-type")
        else:
            source.needs("model.vocab", "number of the tokenizer's pieces, e.g. 32000 of Llama 2, 128256 of Llama 3")
    path = source.text("tokenizer-model") or source.text("tokenizer-name-or-path")
    if path is not None and kind in (kinds := source.table.values["tokenizer-type"]):
        source.set("data.tokenizer", {"kind": kinds[kind], "path": path}, "tokenizer-model")
    files = [PurePath(source.text(name) or "") for name in ("vocab-file", "merge-file")]
    if [file.name for file in files] == ["vocab.json", "merges.txt"] and files[0].parent == files[1].parent:
        source.set("data.tokenizer", {"kind": "gpt2", "path": str(files[0].parent)}, "vocab-file")
    source.set("data", "indexed_gpt2" if kind == "GPT2BPETokenizer" else "indexed")


def _experts(source: Translation) -> None:
    if source.value("num-experts") is None:
        return
    source.set("model.experts_per_token", source.integer("moe-router-topk"), "moe-router-topk")
    source.copy(source.count, "moe-ffn-hidden-size")
    shared = source.integer("moe-shared-expert-intermediate-size")
    each = source.count("moe-ffn-hidden-size") or source.count("ffn-hidden-size")
    if number := source.integer("n-shared-experts"):
        source.set("model.shared_experts", number, "n-shared-experts")
    elif shared:
        if each is None or shared % each:
            source.lacks("moe-shared-expert-intermediate-size", "other_function")
        else:
            source.set("model.shared_experts", shared // each, "moe-shared-expert-intermediate-size")
    _expert_layers(source)
    if source.flag("moe-use-upcycling"):
        source.set("checkpoint.upcycle", True, "moe-use-upcycling")
        source.needs("checkpoint.init_from", "the dense model's checkpoint, as tools/convert_checkpoint.py writes it")
    if capacity := source.number("moe-expert-capacity-factor"):
        source.set("model.expert_capacity", float(capacity), "moe-expert-capacity-factor")
    _router(source)
    source.copy(source.real, "moe-z-loss-coeff")
    _balance(source)


def _router(source: Translation) -> None:
    score = source.value("moe-router-score-function")
    source.choose("moe-router-score-function")
    # MindSpeed-LLM's PAI routing takes the softmax first, too
    first = source.flag("moe-router-pre-softmax") or source.value(_BALANCING) == _PAI
    if first and not source.flag("norm-topk-prob") and score == "softmax":
        source.set("model.router.normalised", False, "moe-router-pre-softmax")
    source.copy(source.real, "moe-router-topk-scaling-factor")
    groups, chosen = source.integer("moe-router-num-groups"), source.count("moe-router-group-topk")
    if groups is not None and groups > 1:
        # a group's score is the sum of its best (experts per token / groups per token) experts there
        counted = 2 if chosen is None else (source.integer("moe-router-topk") or 0) // chosen
        selection = {1: "group_limited_best", 2: "group_limited"}.get(counted)
        uses_logits = score == "softmax" and source.get("model.router.normalised", True)
        if selection is None or uses_logits:
            source.lacks("moe-router-group-topk", "other_function")
        source.set("model.router.selection", selection or "group_limited", "moe-router-num-groups")
        source.set("model.router.groups", groups, "moe-router-num-groups")
        source.set("model.router.groups_per_token", chosen, "moe-router-group-topk")


def _balance(source: Translation) -> None:
    name, factor = _BALANCING, source.number("moe-aux-loss-coeff")
    kind = source.value(name)
    if kind not in (*source.table.values[name], "none"):
        source.lacks(name, "other_function")
        return
    without = kind in ("none", "softmax_topk", "noaux_tc") or not factor
    if source.flag("moe-router-enable-expert-bias"):
        if not without:
            source.lacks(name, "value")
        source.set("model.router.balance", "bias", "moe-router-enable-expert-bias")
        source.copy(source.number, "moe-router-bias-update-rate")
    elif without:
        source.set("model.router.balance", "none", "moe-aux-loss-coeff")
    else:
        source.choose(name)
        source.set("model.router.balance_weight", factor, "moe-aux-loss-coeff")
        if kind == "global_aux_loss":
            source.differs("balance_global")
        micro = source.count("micro-batch-size") or 1
        if kind in ("aux_loss", _PAI) and not source.flag("seq-aux") and micro > 1:
            source.set("model.router.balance_sequences", micro, "micro-batch-size")


def _expert_layers(source: Translation) -> None:
    """Set the expert layers of `moe-layer-freq` and MindSpeed-LLM's `first-k-dense-replace`, without skipped layers."""
    name, layers = "moe-layer-freq", source.count("num-layers") or 1
    dense = max(0, source.integer("first-k-dense-replace") or 0)
    frequency = source.value(name)
    if frequency in (None, 1, -1) and not dense:
        return
    skipped = _skipped(source)
    pattern = layer_pattern(1 if frequency is None else frequency, layers, dense)
    kept = [value for layer, value in enumerate(pattern) if layer not in skipped]
    source.set_expert_layers(kept, name, "first-k-dense-replace")


def _skipped(source: Translation) -> set[int]:
    """Return MindSpeed-LLM's empty layers, which only balance the stages of a pipeline."""
    words = [number for word in source.words("noop-layers") for number in word.split(",")]
    if not all(word.strip().isdecimal() for word in words):
        raise source.wrong("noop-layers", "must be numbers of layers")
    return {int(word) for word in words}


def _layout(source: Translation) -> None:
    stages, layers = source.count("pipeline-model-parallel-size") or 1, source.count("num-layers")
    per, virtual = "num-layers-per-virtual-pipeline-stage", source.count("num-virtual-stages-per-pipeline-rank")
    if layers is not None and (each := source.count(per)):
        virtual = max(1, layers // stages // each)
    if virtual is not None and virtual > 1 and stages > 1:
        source.set("parallel.virtual_stages", virtual, per)
        source.set("parallel.schedule", "interleaved", per)
    tensor, context = source.count("tensor-model-parallel-size") or 1, source.count("context-parallel-size") or 1
    share, one_copy = source.count("expert-tensor-parallel-size"), tensor * context * stages
    least = least_data(source.count("expert-model-parallel-size") or 1, share, tensor, context)
    is_given = not any(name in source.unset for name, key in source.table.direct.items() if key.startswith("parallel."))
    processes = source.command.processes
    if is_given and processes is not None and processes % (one_copy * least) == 0:
        source.set("parallel.data", processes // one_copy)
    if tensor == 1:  # Megatron switches it off itself
        source.overrides.pop("parallel.sequence", None)
    if share == 1 and tensor > 1:
        source.set("parallel.expert_tensor", 1, "expert-tensor-parallel-size")
    elif share not in (None, tensor):
        source.lacks("expert-tensor-parallel-size", "value")
    if context > 1:
        name = "context-parallel-algo" if source.is_given(["context-parallel-algo"]) else "cp-comm-type"
        source.choose(name)
        # sizes of the two levels, of which the first exchanges heads; MindSpeed's option names it alone
        for option in ("hierarchical-context-parallel-sizes", "ulysses-degree-in-cp"):
            if source.value(name) in ("a2a+p2p", "hybrid_cp_algo") and (words := source.words(option)):
                size = int(found[0]) if (found := re.match(r"\d{1,6}", words[0])) else 0
                if size < 1 or context % size or size == context:
                    source.lacks(option, "value")
                else:
                    source.set("parallel.context_ulysses", size, option)
    if sizes := [int(size) for word in source.words("num-layer-list") for size in re.findall(r"\d{1,4}", word)]:
        source.set("parallel.layers", sizes, "num-layer-list")
    if source.is_given(["zero-stage"]):
        source.set("parallel.zero", source.integer("zero-stage"), "zero-stage")
    elif source.flag("use-torch-fsdp2"):
        source.set("parallel.zero", 3, "use-torch-fsdp2")
    elif source.is_given(["data-parallel-sharding-strategy"]):
        source.choose("data-parallel-sharding-strategy")
    else:
        source.switch(1, "use-distributed-optimizer")
    if minutes := source.number("distributed-timeout-minutes"):
        source.set("parallel.timeout_s", 60 * minutes, "distributed-timeout-minutes")


def _memory(source: Translation) -> None:
    granularity = source.text("recompute-granularity")
    if source.flag("recompute-activations"):
        granularity = "selective"
    if granularity == "full" or source.flag("checkpoint-activations"):
        layers = source.integer("recompute-num-layers") if source.text("recompute-method") == "block" else None
        source.set("memory.recompute", "full" if layers is None else layers, "recompute-granularity")
    elif granularity == "selective":
        parts, modules = source.table.values["recompute-modules"], source.words("recompute-modules")
        if any(module not in parts for module in modules):
            source.lacks("recompute-modules", "value")
        if chosen := [parts[module] for module in modules if module in parts]:
            source.set("memory.recompute", "selective", "recompute-granularity")
            source.set("memory.selective", chosen, "recompute-modules")
    elif source.flag("recompute-activation-function"):
        source.set("memory.recompute", "selective", "recompute-activation-function")
        source.set("memory.selective", ["activation"], "recompute-activation-function")
    moved = {"cpu-offloading": "activations", "swap-attention": "activations"}
    moved |= {"optimizer-cpu-offload": "optimizer", "swap-optimizer": "optimizer"}
    if parts_moved := [part for name, part in moved.items() if source.flag(name)]:
        source.set("memory.offload", list(dict.fromkeys(parts_moved)), *moved)


def _precision(source: Translation) -> None:
    if source.value("fp8-format") and source.value("num-experts") is None:
        source.set("precision", "fp8", "fp8-format")
    elif source.value("fp8-format"):
        source.set("precision", "bf16", "fp8-format")
        source.lacks("fp8-format", "fp8_experts")
    elif source.flag("fp16"):
        source.set("precision", "fp16", "fp16")
        source.copy(source.number, "initial-loss-scale", "loss-scale-window", "min-loss-scale")
        source.copy(source.count, "hysteresis")
        if not source.flag("accumulate-allreduce-grads-in-fp32"):
            source.differs("reduce_fp32")
    else:
        source.set("precision", "bf16" if source.flag("bf16") else "fp32", "bf16")
    source.switch("bf16", "grad-reduce-in-bf16")


def _data(source: Translation) -> None:
    held_out = source.blend("valid-data-path")[0]
    if source.flag("mock-data"):
        source.set("data", "synthetic", "mock-data")
        source.overrides.pop("data.tokenizer", None)
    else:
        name = "train-data-path" if source.is_given(["train-data-path"]) else "data-path"
        prefixes, weights = source.blend(name)
        files = "prefixes of indexed files, e.g. [/data/web]"
        if source.flag("sft"):
            files = "files of conversations, e.g. [chat.jsonl]"
            source.set("data", "instructions", "sft")
            source.needs("data.template", "e.g. chatml, or the path of a Jinja template")
            if "data.tokenizer" not in source.overrides:
                source.needs("data.tokenizer", "e.g. {kind:huggingface,path:FOLDER}")
        if prefixes:
            source.set("data.train", prefixes, name)
        else:
            source.needs("data.train", files)
        if weights:
            source.set("data.weights", weights, name)
        _packing(source)
    if held_out and not source.flag("mock-data"):
        source.set("data.validation", held_out, "valid-data-path")
        source.set("validation.every", source.integer("eval-interval"), "eval-interval")
        if size := source.count("global-batch-size"):
            source.set("validation.sequences", size * (source.integer("eval-iters") or 1), "eval-iters")
    else:
        source.set("validation.every", 0, "eval-interval")


def _packing(source: Translation) -> None:
    resets = ("reset-attention-mask", "reset-position-ids")
    for name in resets:
        source.switch(True, name)
    if any(map(source.flag, resets)) and source.get("data") == "indexed":
        source.needs("data.packing.eod", "the tokenizer's id that ends a document")
