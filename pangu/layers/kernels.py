"""The attention kernels, and the choice among them."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pangu.config.attention import obstacles
from pangu.config.errors import ConfigError, Problem
from pangu.config.model import ModelConfig
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.masks import AttentionMask

if TYPE_CHECKING:
    from pangu.layers.biases import Bias


class QKV(NamedTuple):
    query: Tensor
    """[batch, heads, sequence, head size]."""
    key: Tensor
    """The same, or fewer heads, each for a group of neighbouring query heads (Ainslie et al. 2023), or a longer
    sequence, which ends with the queries; `value` likewise."""
    value: Tensor

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    def ungrouped(self) -> QKV:
        """With keys and values repeated for every query head."""
        repeats = self.query.shape[1] // self.key.shape[1]
        if repeats == 1:
            return self
        return QKV(self.query, *(x.repeat_interleave(repeats, dim=1) for x in (self.key, self.value)))


@dataclass(frozen=True)
class MaskAndBias:
    mask: AttentionMask
    bias: Bias | None
    length: int
    """Number of keys."""
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    """Position of the first query; the keys before it come from a KV cache."""

    def dense_mask(self) -> Tensor:
        """bool [batch or 1, 1, queries, sequence], true where the query sees the key."""
        return self.mask.dense(self.length, self.device, self.first)

    def dense_bias(self, dtype: torch.dtype) -> Tensor:
        """[batch or 1, heads / ranks or 1, queries, sequence]: the bias, -inf where the mask forbids."""
        bias = torch.zeros((), device=self.device) if self.bias is None else self.bias.dense(self.first)
        return torch.where(self.dense_mask(), bias.to(dtype), -math.inf)


class Kernel(Protocol):
    """softmax(q kᵀ / sqrt(head size) + bias) v over the keys that the mask allows. Made for one forward over a
    micro-batch, called by every layer."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute what all layers share."""

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [the shape of `query`] and the scores before bias and mask; None from a kernel that never stores
        them. `keys` None: no dropout. `below`: scores [batch, heads, queries, keys] of the layer below, which are
        added; only a kernel with the ability `scores` gets any."""


class Reference:
    """Explicit scores and a softmax in fp32 (fp64 in fp64)."""

    def __init__(self, terms: MaskAndBias) -> None:
        self.bias = terms.dense_bias(torch.promote_types(terms.dtype, torch.float32))

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = qkv.ungrouped()
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]))
        if below is not None:
            scores = scores + below
        probabilities = (scores + self.bias).softmax(-1).to(query.dtype)
        return dropout.probabilities(probabilities, keys) @ value, scores


class Sdpa:
    """torch's scaled_dot_product_attention."""

    def __init__(self, terms: MaskAndBias) -> None:
        self.mask: Tensor | None = None
        if terms.bias is not None:
            self.mask = terms.dense_bias(terms.dtype)
        elif terms.first or not terms.mask.is_plain_causal:
            self.mask = terms.dense_mask()

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        # with a mask, no fused kernel reads grouped heads as they are
        parts = qkv if self.mask is None else qkv.ungrouped()
        output = F.scaled_dot_product_attention(
            *parts,
            attn_mask=self.mask,
            dropout_p=dropout.in_kernel(keys),
            is_causal=self.mask is None,
            enable_gqa=parts.is_grouped,
        )
        return output, None


class Flex:
    """torch's FlexAttention (Dong et al. 2024), which skips the blocks that the mask forbids. Without dropout, and on a
    CPU without backward."""

    def __init__(self, terms: MaskAndBias) -> None:
        mask, length = terms.mask, terms.length
        rows = None if mask.documents is None else mask.documents.shape[0]
        self.blocks = create_block_mask(mask.rule(), rows, None, length, length, terms.device)
        self.score = None if terms.bias is None else terms.bias.score_mod
        self.compute = _flex(compiled=terms.device.type != "cpu")

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.compute(*qkv, self.score, self.blocks, enable_gqa=qkv.is_grouped), None


@functools.cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """FlexAttention; only its compiled form is a fused kernel, which on a CPU needs a C++ compiler."""
    if compiled:
        return torch.compile(flex_attention)
    return flex_attention


class FlashAttn:
    """The package flash-attn (Dao 2023), 2.4 or later; documents become sequences of different lengths."""

    def __init__(self, terms: MaskAndBias) -> None:
        self.package = _flash_attn()
        self.segments = terms.mask.segments()
        # keys to the left and to the right of a query; -1: all
        self.window = (-1, -1) if terms.mask.window is None else (terms.mask.window - 1, 0)
        self.slopes = None if terms.bias is None else terms.bias.slopes

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        options = {
            "dropout_p": dropout.in_kernel(keys),
            "causal": True,
            "window_size": self.window,
            "alibi_slopes": self.slopes,
        }
        # the package wants [batch, sequence, heads, head size]
        parts = [part.transpose(1, 2) for part in qkv]
        if self.segments is None:
            return self.package.flash_attn_func(*parts, **options).transpose(1, 2), None
        bounds, longest = self.segments
        flat = (part.flatten(0, 1) for part in parts)
        result = self.package.flash_attn_varlen_func(*flat, bounds, bounds, longest, longest, **options)
        return result.view(parts[0].shape).transpose(1, 2), None


def _flash_attn() -> ModuleType:
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        rule = f"the package flash-attn cannot be imported ({error})"
        works = "installing flash-attn 2.4 or later helps, or model.attention=auto works"
        raise ConfigError([Problem("model.attention", "flash_attn", rule, works)]) from error


KERNELS: dict[str, type[Kernel]] = {"reference": Reference, "sdpa": Sdpa, "flex": Flex, "flash_attn": FlashAttn}
"""By the values of `model.attention`; `pangu.config.attention` says what each can do."""


def over_cache(kernel: type[Kernel]) -> type[Kernel]:
    """The kernel for queries whose keys lie in a cache: `sdpa` in place of one that needs as many queries as keys."""
    return kernel if kernel is Reference else Sdpa


def attention_kernels(model: ModelConfig, precision: str, device: torch.device) -> list[str]:
    """The kernels that `model.attention=auto` chooses among, the preferred one first; another request is the only one.
    They give the same result to rounding, but each draws different dropout masks: with dropout the only candidate is,
    on a CPU, the one whose masks do not depend on the layout, on an accelerator the fused one. Raises UserError if the
    requested kernel cannot train this model on this device."""
    if model.attention != "auto":
        problems = list(obstacles(model.attention, model, precision, device.type))
        if problems:
            raise ConfigError(problems)
        if model.attention == "flash_attn":
            _flash_attn()
        return [model.attention]
    order = ["sdpa", "reference"]
    if model.attention_dropout > 0 and device.type == "cpu":
        order = ["reference"]
    able = [kernel for kernel in order if not any(obstacles(kernel, model, precision, device.type))]
    return able[:1] if model.attention_dropout > 0 else able
