"""What backward needs kept of forward, in bytes, in closed form: per layer, and for the head and the loss.

The terms are those of Korthikanti et al. 2022, section 4 and table 2, of which a layer of ours differs in this:

- statistics of the norms, which the paper leaves out;
- the softmax is kept in fp32 (fp64 in fp64) and once more in the compute format, where the product with the values
  takes it in: 4 + 2 bytes a probability in 16 bits, against the paper's 2 + 2;
- a fused kernel with a mask of documents keeps it in the compute format, one number for each pair of positions;
- queries, keys and values are cut from one product. Whoever keeps one of them as it lies in there keeps all.

Names: s = sequence, b = micro-batch, h = hidden, a = heads, t = tensor-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Literal

from pangu.config.schema import RunConfig
from pangu.layers.loss import block_rows
from pangu.planning.states import BYTES


def layer_activations(
    config: RunConfig,
    kernel: str,
    *,
    recomputed: bool = False,
    query_layer: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> dict[str, int]:
    """Bytes that a tensor-parallel rank keeps of one layer and one micro-batch, by what they are for.

    Args:
        config: the run.
        kernel: attention kernel, `reference` or `sdpa`, which is counted as a fused
            one; on a CPU it is one where no probabilities are dropped.
        recomputed: the whole layer is one of those that `memory.recompute` computes again.
        query_layer: it is PanGu-α's top layer.
        device: on a CPU torch keeps statistics of 16-bit layer norms in 16 bits, and has no fused RMS norm: that keeps
            its input and its normalised input in fp32.
    """
    model, parts = config.model, config.memory.recomputed_parts
    size = BYTES[config.precision.compute]
    tokens = model.sequence * config.batch.micro_size
    outside = tokens // (config.parallel.tensor if config.parallel.sequence else 1)
    state = outside * model.hidden * size
    kept = {"position vectors": tokens * model.hidden * size} if query_layer else {}
    if recomputed:
        return kept | {"input": state}
    dropped_norms = 0 if "norm" not in parts else 1 if model.norm_placement == "post" else 2
    inner = tokens * model.ffn_size // config.parallel.tensor * size
    # besides input and output: sigmoid(1.702x), SiLU of the gate
    own = 1 if model.activation in ("fast_gelu", "swiglu") else 0
    again = "activation" in parts
    return kept | {
        **_norms(config, outside, dropped_norms, device),
        "inputs of products": (2 - dropped_norms) * state,
        **_attention(config, kernel, query_layer, device),
        "dropout masks": 2 * outside * model.hidden if model.dropout else 0,
        "input of the activation": inner * (2 if model.activation == "swiglu" else 1),
        "activation": 0 if again else inner * (own + 1),
    }


def head_peak(config: RunConfig, device: str = "cpu") -> int:
    """Bytes that a tensor-parallel rank needs at once for the head and the loss of one micro-batch, forward or
    backward, on top of the hidden states and the output matrix.

    The logits of `loss.chunk` tokens exist in the compute format, where they become their own gradient; a few rows of
    them at a time in fp32 (fp64 in fp64). After that there is what a product makes of their gradient, the gradients of
    the matrix and of the tokens. Chunks add the sum of the matrix's gradients so far and the tokens' gradients.
    """
    model, tokens = config.model, config.model.sequence * config.batch.micro_size
    size = BYTES[config.precision.compute]
    width = math.ceil(model.vocab / config.parallel.tensor)
    matrix = width * model.hidden * size
    at_once = min(tokens, config.loss.chunk or tokens)
    block = min(at_once, block_rows(width, device)) * width * max(4, size)
    sums = matrix + tokens * model.hidden * size if at_once < tokens else 0
    return sums + at_once * width * size + max(block, matrix + at_once * model.hidden * size)


def _norms(config: RunConfig, outside: int, dropped: int, device: str) -> dict[str, int]:
    """Inputs and statistics of the two norms."""
    size = BYTES[config.precision.compute]
    wide = max(4, size)
    width = outside * config.model.hidden
    if config.model.norm == "layernorm":
        return {
            "inputs of norms": 2 * width * size,
            "statistics of norms": 4 * outside * (size if device == "cpu" else wide),
        }
    inputs = 2 * width * size
    if device == "cpu":
        # the input itself is kept only where its product's input is made of it, or where it is fp32 already
        inputs = 4 * width * wide + (dropped * width * size if size < wide else 0)
    return {"inputs of norms": inputs, "statistics of norms": 2 * outside * wide}


def _head_norms(config: RunConfig, normed: int, device: str) -> int:
    """Besides what they take in and give out, of `normed` bytes: statistics, and what `_norms` says of RMS on a CPU."""
    model = config.model
    size = BYTES[config.precision.compute]
    wide = max(4, size)
    rows = normed // size // model.head_size
    if model.norm == "layernorm":
        return 2 * rows * (size if device == "cpu" else wide)
    copies = 0 if device != "cpu" else 1 if size == wide else 2
    return rows * wide + copies * normed // size * wide


def _attention(config: RunConfig, kernel: str, query_layer: bool, device: str) -> dict[str, int]:
    """From the projections to the output product's input."""
    model, batch, ranks = config.model, config.batch.micro_size, config.parallel.tensor
    size = BYTES[config.precision.compute]
    wide = max(4, size)
    tokens, pairs, heads = model.sequence * batch, batch * model.sequence**2, model.heads // ranks
    query, group = (tokens * width // ranks * size for width in (model.query_size, model.kv_size))
    again = "attention" in config.memory.recomputed_parts
    fused, masked, rope = kernel != "reference", config.data.packing.reset_mask, model.positions == "rope"

    # Which of the three have memory of their own; the others are views of a projection and keep all of it. Explicit
    # products lay the heads one after another, unless there is but one sequence or head.
    copied = not (again or fused or batch == 1 or heads == 1)
    repeated = group < query and not again and (masked or kernel != "sdpa")
    turned = rope or model.qk_norm
    own_query, own_key, own_value = turned or copied, turned or copied or repeated, copied or repeated
    width = query if repeated else group
    kept = own_query * query + (own_key + own_value) * width
    # a norm keeps what it takes in, but for one that keeps it in fp32
    viewed = model.qk_norm and (model.norm == "layernorm" or device != "cpu" or size == wide)
    if query_layer:
        kept += (viewed or not own_query) * query + (viewed or not (own_key and own_value)) * 2 * group
    elif viewed or not (own_query and own_key and own_value):
        kept += query + 2 * group

    terms = {"queries, keys, values": kept, "input of the output product": query}
    if model.qk_norm:
        terms["norms of heads"] = _head_norms(config, query + group, device)
    if again:
        return terms
    if fused:
        # its output lies as the queries do: turned ones, head after head, and then it is copied for the product
        return terms | {
            "log of sums of exponentials": tokens * heads * wide,
            "attention output": query
            if rope or (model.qk_norm and (model.norm == "layernorm" or device != "cpu"))
            else 0,
            "mask": pairs * size if masked else 0,
        }
    dropout = model.attention_dropout > 0
    return terms | {
        "softmax": pairs * heads * wide,
        "probabilities": pairs * heads * size if dropout or size < wide else 0,
        "dropped probabilities": pairs * heads if dropout else 0,
    }
