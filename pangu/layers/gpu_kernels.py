"""The attention kernels of GPUs, and which of them can run here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pangu.config.errors import Problem
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.kernels import QKV, Kernel, MaskAndBias, Sdpa


class Cudnn(Sdpa):
    """cuDNN's kernel, whichever torch would take."""

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return super().__call__(qkv, dropout, keys, below)


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


class Flash:
    """The flash attention (Dao 2023) in torch; documents become sequences of different lengths."""

    def __init__(self, terms: MaskAndBias) -> None:
        assert terms.mask.documents is None or terms.mask.bounds is not None
        self.bounds = terms.mask.bounds
        # keys to the left of a query; -1: all
        self.left = -1 if terms.mask.window is None else terms.mask.window - 1

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        parts = [part.transpose(1, 2) for part in qkv]
        shape = parts[0].shape
        if self.bounds is not None:
            # the one copy, of more than one row: projections have the rows of a place side by side
            parts = [part.flatten(0, 1) for part in parts]
        query, key, value = parts
        output = self.attend(query, key, value, shape[1], dropout.in_kernel(keys))
        return output.view(shape).transpose(1, 2), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, longest: int, dropout: float) -> Tensor:
        """[batch, sequence, heads, head size] or, of documents no longer than `longest`, [tokens, heads, head size]."""
        return flash_attention(query, key, value, self.bounds, longest, self.left, dropout)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, longest: int, left: int, dropout: float
) -> Tensor:
    """torch's operator, as `torch.nn.attention.varlen` calls it, which drops nothing; autograd knows its backward.
    Arguments are those of `Flash`."""
    window = {"window_size_left": left, "window_size_right": 0}
    lengths = (bounds, bounds, longest, longest)
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, *lengths, dropout, left < 0, False, **window)[0]


class FlashAttn(Flash):
    """The package flash-attn, 2.4.1 or later."""

    def __init__(self, terms: MaskAndBias) -> None:
        super().__init__(terms)
        self.package = importlib.import_module("flash_attn")
        self.slopes = None if terms.bias is None else terms.bias.slopes

    def attend(self, query: Tensor, key: Tensor, value: Tensor, longest: int, dropout: float) -> Tensor:
        options = {"dropout_p": dropout, "causal": True, "window_size": (self.left, 0), "alibi_slopes": self.slopes}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()  # torch's own kernels look for it
        if self.bounds is None:
            return self.package.flash_attn_func(query, key, value, **options)
        lengths = (self.bounds, self.bounds, longest, longest)
        return self.package.flash_attn_varlen_func(query, key, value, *lengths, **options)


GPU_KERNELS: dict[str, type[Kernel]] = {"cudnn": Cudnn, "flash": Flash, "flex": Flex, "flash_attn": FlashAttn}


BUILT_IN = {"flash": torch.backends.cuda.is_flash_attention_available, "cudnn": torch.backends.cudnn.is_available}
"""Kernels that come with a torch that was built with them -> whether it was."""


def can_run(kernel: str, device: torch.device) -> bool:
    """Whether this torch has one of `BUILT_IN`, and the device can run it."""
    return device.type == "cuda" and BUILT_IN[kernel]() and torch.cuda.get_device_capability(device) >= (8, 0)


def missing(kernel: str, device: torch.device) -> Iterator[Problem]:
    """Why a kernel cannot run here at all."""
    if kernel in BUILT_IN and not can_run(kernel, device):
        rule = "needs a GPU of compute capability 8.0 or later, and a torch that was built with it"
        yield Problem("model.attention", kernel, rule, "model.attention=auto works")
    if kernel == "flash_attn":
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:
            rule = f"the package flash-attn cannot be imported ({error})"
            works = "installing flash-attn 2.4.1 or later helps, or model.attention=auto works"
            yield Problem("model.attention", kernel, rule, works)


def candidates(device: torch.device, dense: bool) -> list[str]:
    """Those that may be the fastest here, the preferred one first. `dense`: `sdpa` needs mask or bias as a matrix."""
    kernels = ["flash", "sdpa", "flex"] if dense else ["sdpa", "flash", "cudnn"]
    return [kernel for kernel in (*kernels, "flash_attn", "reference") if not any(missing(kernel, device))]
