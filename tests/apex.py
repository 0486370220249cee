"""A stand-in for NVIDIA's apex on a machine without a GPU: the functions that the package calls, with apex's signatures
and arithmetic, computed by torch.

As strict as apex's C++: operands are contiguous and of the formats that its kernels take, numbers and tensors stand
where it has them. Calls are counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.layers import apex

NARROW = (torch.bfloat16, torch.float16)
CALLS: Counter[str] = Counter()
"""Calls of each function, from all threads."""


def _statistics(x: Tensor, shape: Sequence[int], *weights: Tensor) -> Tensor:
    assert x.shape[-len(shape) :] == torch.Size(shape)
    assert all(weight.shape == torch.Size(shape) and weight.dtype == x.dtype for weight in weights)
    return x.contiguous().to(torch.promote_types(x.dtype, torch.float32))


class FusedLayerNormAffineFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float, memory: bool = False
    ) -> Tensor:
        CALLS["layer norm"] += 1
        wide = _statistics(input, normalized_shape, weight, bias)
        deviation = wide - wide.mean(-1, keepdim=True)
        scale = (deviation.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(deviation * scale, scale, weight)
        return (deviation * scale * weight + bias).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, scale, weight = ctx.saved_tensors
        grad = grads[0].to(normed.dtype)
        change = grad * weight
        change = change - change.mean(-1, keepdim=True) - normed * (change * normed).mean(-1, keepdim=True)
        sums = [part.flatten(0, -2).sum(0).to(weight.dtype) for part in (grad * normed, grad)]
        return (change * scale).to(grads[0].dtype), *sums, None, None, None


class FusedRMSNormAffineFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Any, eps: float, memory: bool = False
    ) -> Tensor:
        CALLS["rms norm"] += 1
        wide = _statistics(input, normalized_shape, weight)
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(wide * scale, scale, weight)
        return (wide * scale * weight).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, scale, weight = ctx.saved_tensors
        grad = grads[0].to(normed.dtype)
        change = grad * weight
        change = change - normed * (change * normed).mean(-1, keepdim=True)
        of_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return (change * scale).to(grads[0].dtype), of_weight, None, None, None


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    CALLS["weight gradient"] += 1
    assert input_2d.dtype == d_output_2d.dtype
    assert input_2d.dtype in (*NARROW, torch.float32)
    assert d_weight.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (input_2d, d_output_2d, d_weight))  # C++ reads the memory as it is
    d_weight += d_output_2d.t().float() @ input_2d.float()


def _lists(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], depth: int) -> None:
    """The checks of multi_tensor_apply; a kernel is launched at the last element of the last tensor."""
    assert isinstance(chunk_size, int)
    assert noop_flag.dtype == torch.int32
    assert len(tensor_lists) == depth
    assert len(tensor_lists[0]) > 0
    assert all(each[-1].numel() for each in tensor_lists)
    for each in tensor_lists:
        assert [tensor.numel() for tensor in each] == [tensor.numel() for tensor in tensor_lists[0]]
        assert all(tensor.is_contiguous() and tensor.dtype in (*NARROW, torch.float32) for tensor in each)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    CALLS["norms"] += 1
    _lists(chunk_size, noop_flag, tensor_lists, 1)
    assert int(noop_flag) == 0
    squares = torch.stack([tensor.float().square().sum() for tensor in tensor_lists[0]])
    noop_flag.fill_(int(not squares.isfinite().all()))
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else squares[:0]


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    CALLS["adam"] += 1
    _lists(chunk_size, noop_flag, tensor_lists, 4)
    assert lr.dtype == inv_scale.dtype == torch.float32
    assert step.dtype == torch.int32
    assert mode == bias_correction == 1
    if int(noop_flag) == 1:
        return
    first_rate, second_rate = torch.tensor([beta1, beta2])  # C++ takes them as floats
    for grad, weight, first, second in zip(*tensor_lists, strict=True):
        grad.mul_(inv_scale)
        first.copy_(first_rate * first + (1 - first_rate) * grad)
        second.copy_(second_rate * second + (1 - second_rate) * grad * grad)
        denominator = (second / (1 - second_rate**step)).sqrt() + epsilon
        weight.sub_(lr * (first / (1 - first_rate**step) / denominator + weight_decay * weight))


@contextmanager
def installed() -> Iterator[Counter[str]]:
    """Install the stand-in within the block, for tensors of a CPU; yields the calls."""
    modules = {name: ModuleType(name) for name in ("apex", "apex.normalization", *sum(apex.USES.values(), ()))}
    for cls in (FusedLayerNormAffineFunction, FusedRMSNormAffineFunction):
        setattr(modules["apex.normalization.fused_layer_norm"], cls.__name__, cls)
    modules["fused_weight_gradient_mlp_cuda"].wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    for function in (multi_tensor_l2norm, multi_tensor_adam_capturable):
        setattr(modules["amp_C"], function.__name__, function)
    CALLS.clear()
    with patch.dict(sys.modules, modules), patch.object(apex, "DEVICES", ("cpu",)):
        yield CALLS
