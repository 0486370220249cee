"""Attention kernels of GPUs, and whether they can run here."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._triton import has_triton

from pangu.common.errors import Problem
from pangu.layers.attention_blocks import with_sinks
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.dropout_masks import is_kept
from pangu.layers.kernels import QKV, Kernel, MaskAndBias, Reference, Sdpa
from pangu.layers.masks import AttentionMask
from pangu.layers.sparse import FLEX_TILE
from pangu.layers.triton_attention import Triton

MOST_PAIRS = 1 << 26
"""Number of token pairs of a mask that are examined at a time."""
FEWEST_COLUMNS = 16
"""Minimum columns of a head in FlexAttention's compiled kernel."""


class Cudnn(Sdpa):
    """Kernel of cuDNN, whichever one torch would choose."""

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention; see `Kernel`."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return super().__call__(qkv, dropout, keys, below, sinks)


class Flex:
    """Kernel of FlexAttention (Dong et al. 2024), which skips masked blocks and drops like `reference`."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare the block mask."""
        self.blocks = block_mask(terms.mask, terms.length, terms.device)
        self.score = None if terms.bias is None else terms.bias.score_mod
        # there is no backward pass on a CPU, where it is not compiled
        self.compute = _flex(compiled=terms.device.type != "cpu")

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention; see `Kernel`."""
        masks = dropout.masks(qkv.query, keys)
        rows = None if masks is None else masks.rows ^ masks.place
        return self.compute(qkv, self.score, self.blocks, rows, dropout.probability, sinks), None


def flex(
    qkv: QKV,
    score_mod: Callable[..., Tensor] | None,
    blocks: BlockMask,
    rows: Tensor | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return FlexAttention with dropout by `rows` (row keys xor the place key), if given.

    A kernel changes scores before the softmax, but dropout follows it. With s a score, m 1 where a probability is kept,
    and lse the log of the sum of exp over keys,

        sum_j m_j exp(s_j) v_j / sum_j exp(s_j) = (sum_j m_j exp(s_j) v_j / sum_j m_j exp(s_j)) exp(lse(s, m) - lse(s))

    The first factor and lse(s, m) are attention with dropped scores at -inf, lse(s) is attention without dropout. If
    all scores of a query are dropped, lse(s, m) is -inf, and its output and gradients are 0.
    """
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": qkv.is_grouped}
    if rows is None and sinks is None:
        return flex_attention(*qkv, score_mod, **options)
    options["return_aux"] = AuxRequest(lse=True)
    if rows is None:
        output, full = flex_attention(*qkv, score_mod, **options)
        return (output * (full.lse - with_sinks(full.lse, sinks)).exp()[..., None]).to(output.dtype)

    def without_dropped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        biased = score if score_mod is None else score_mod(score, batch, head, query, key)
        # adding -inf makes exp and so the gradient of the score 0, and the backward pass needs no mask
        return biased + torch.where(is_kept(rows[batch, head, query], key, dropout), 0.0, -math.inf)

    output, kept = flex_attention(*qkv, without_dropped, **options)
    # only its sums are needed, so few values; the compiled backward pass needs a gradient of the output, here 0
    few = qkv.value[..., :FEWEST_COLUMNS].detach()
    nothing, full = flex_attention(qkv.query, qkv.key, few, score_mod, **options)
    share = (kept.lse - with_sinks(full.lse + 0.0 * nothing[..., 0], sinks)).exp() / (1 - dropout)
    return (output * share[..., None]).to(output.dtype)


def block_mask(mask: AttentionMask, length: int, device: torch.device) -> BlockMask:
    """Return FlexAttention's form of a mask: the tiles that are seen in part, and those that are seen fully."""
    # A band of queries at a time: torch's own function takes all pairs of tokens at once, 17 GB each for 128K tokens.
    rows = 1 if mask.documents is None else mask.documents.shape[0]
    step = max(1, MOST_PAIRS // (rows * length * FLEX_TILE)) * FLEX_TILE
    part, whole = [], []
    for first in range(0, length, step):
        seen = mask.dense(range(first, min(length, first + step)), range(length), device)
        seen = F.pad(seen, (0, -length % FLEX_TILE, 0, -seen.shape[2] % FLEX_TILE))
        tiles = seen.unflatten(3, (-1, FLEX_TILE)).unflatten(2, (-1, FLEX_TILE))
        whole.append(tiles.all(5).all(3))
        part.append(tiles.any(5).any(3) & ~whole[-1])
    lists = (*_listed(torch.cat(part, 2)), *_listed(torch.cat(whole, 2)))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=FLEX_TILE, mask_mod=mask.rule(), seq_lengths=(length, length))


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


@functools.cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    return torch.compile(flex) if compiled else flex


class Flash:
    """Kernel of torch's flash attention (Dao 2023); documents become sequences of different lengths."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare document bounds and window."""
        assert terms.mask.documents is None or terms.mask.bounds is not None
        self.bounds = terms.mask.bounds
        # keys to the left of a query; -1: all
        self.left = -1 if terms.mask.window is None else terms.mask.window - 1

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention; see `Kernel`."""
        parts = [part.transpose(1, 2) for part in qkv]
        shape = parts[0].shape
        if self.bounds is not None:
            # the only copy, with several rows: projections place the rows of a position side by side
            parts = [part.flatten(0, 1) for part in parts]
        query, key, value = parts
        output = self.attend(query, key, value, shape[1], dropout.in_kernel(keys))
        return output.view(shape).transpose(1, 2), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, longest: int, dropout: float) -> Tensor:
        """Attend in [batch, sequence, heads, head size]; documents (up to `longest`): [tokens, heads, head size]."""
        return flash_attention(query, key, value, self.bounds, longest, self.left, dropout)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, longest: int, left: int, dropout: float
) -> Tensor:
    """Call torch's operator like `torch.nn.attention.varlen`, which lacks dropout; arguments as in `Flash`."""
    window = {"window_size_left": left, "window_size_right": 0}
    lengths = (bounds, bounds, longest, longest)
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, *lengths, dropout, left < 0, False, **window)[0]


class FlashAttn(Flash):
    """Kernel of the package flash-attn, 2.4.1 or later."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Import the package."""
        super().__init__(terms)
        self.package = importlib.import_module("flash_attn")
        self.slopes = None if terms.bias is None else terms.bias.slopes

    def attend(self, query: Tensor, key: Tensor, value: Tensor, longest: int, dropout: float) -> Tensor:
        """Attend as in `Flash`."""
        options = {"dropout_p": dropout, "causal": True, "window_size": (self.left, 0), "alibi_slopes": self.slopes}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()  # torch's kernels do it themselves
        if self.bounds is None:
            return self.package.flash_attn_func(query, key, value, **options)
        lengths = (self.bounds, self.bounds, longest, longest)
        return self.package.flash_attn_varlen_func(query, key, value, *lengths, **options)


KERNELS: dict[str, type[Kernel]] = {
    "reference": Reference,
    "sdpa": Sdpa,
    "cudnn": Cudnn,
    "flash": Flash,
    "flex": Flex,
    "flash_attn": FlashAttn,
    "triton": Triton,
}
"""Kernels by value of `model.attention`; see `pangu.config.attention` for their abilities."""

BUILT_IN: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.is_flash_attention_available,
    "cudnn": torch.backends.cudnn.is_available,
    "flex": has_triton,
    "triton": has_triton,
}
"""Kernels that come with torch -> function that returns whether this build has them."""


def can_run(kernel: str, device: torch.device) -> bool:
    """Return whether this torch has a kernel of `BUILT_IN` and the device can run it."""
    return device.type == "cuda" and BUILT_IN[kernel]() and torch.cuda.get_device_capability(device) >= (8, 0)


def missing(kernel: str, device: torch.device) -> Iterator[Problem]:
    """Yield the reasons why a kernel cannot run here at all."""
    if kernel in BUILT_IN and not can_run(kernel, device):
        rule = "needs a GPU of compute capability 8.0 or later, and a torch built with this kernel"
        yield Problem("model.attention", kernel, rule, "set model.attention=auto")
    if kernel == "flash_attn":
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:
            rule = f"the package flash-attn cannot be imported ({error})"
            fix = "install flash-attn 2.4.1 or later, or set model.attention=auto"
            yield Problem("model.attention", kernel, rule, fix)


def candidates(device: torch.device, dense: bool) -> list[str]:
    """Return the kernels that may be the fastest here, the preferred one first."""
    # `dense`: `sdpa` would need mask or bias as a matrix, or use its own dropout.
    kernels = ["flash", "triton", "sdpa", "flex", "cudnn"] if dense else ["sdpa", "flash", "cudnn", "flex", "triton"]
    return [kernel for kernel in (*kernels, "flash_attn", "reference") if not any(missing(kernel, device))]
