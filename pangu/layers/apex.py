"""Kernels of NVIDIA's package apex that a run may use instead of torch's, which give equal results up to rounding.

apex's LAMB kernels are no candidates: `multi_tensor_lamb` computes trust ratios of the tensors it is given, which are
shards here, and `multi_tensor_lamb_stage1` gets the step from the host, which does not know whether one was skipped.
LAMB takes its moments and norms from the kernels below instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pangu.common.errors import ConfigError, Problem
from pangu.config.schema import RunConfig

_NORMS, _PRODUCT, _MULTI_TENSOR = "apex.normalization.fused_layer_norm", "fused_weight_gradient_mlp_cuda", "amp_C"
USES = {"norm": (_NORMS, "fused_layer_norm_cuda"), "weight_gradient": (_PRODUCT,), "optimizer": (_MULTI_TENSOR,)}
"""Keys of `kernels` -> modules of apex that compute them."""
DEVICES = ("cuda",)
CHUNK = 2048 * 32
"""Elements of a block of a multi-tensor kernel, as in apex's optimizers."""
LARGEST = 2**31
"""Number of elements that overflows the 32-bit indices of a multi-tensor kernel."""


def candidates(use: str, config: RunConfig, device: torch.device) -> list[str]:
    """Return what a key of `kernels` chooses from; raise `ConfigError` if apex is asked for and cannot run."""
    wanted = getattr(config.kernels, use)
    reasons = [] if wanted == "torch" else list(missing(use, config, device))
    if wanted == "apex" and reasons:
        raise ConfigError(reasons)
    return [wanted] if wanted != "auto" else ["torch"] if reasons else ["torch", "apex"]


def missing(use: str, config: RunConfig, device: torch.device) -> Iterator[Problem]:
    """Yield the reasons why apex cannot compute a key of `kernels` in a run."""
    compute, problem = config.precision.compute, partial(Problem, f"kernels.{use}", "apex")
    auto = f"set kernels.{use}=auto"
    if device.type not in DEVICES:
        yield problem(f"needs a GPU, got {device.type}", auto)
    elif use == "norm" and config.compile:
        yield problem("a compiled layer fuses its norms", f"set compile=false, or {auto}")
    elif use == "weight_gradient" and compute not in ("bf16", "fp16"):
        yield problem(f"adds matmuls of bf16 or fp16 to fp32, got precision.compute = {compute}", auto)
    elif use == "optimizer" and (compute == "fp64" or "optimizer" in config.memory.offload):
        yield problem("updates fp32 on the device, not with precision=fp64 or memory.offload=[optimizer]", auto)
    else:
        try:
            list(map(importlib.import_module, USES[use]))
        except ImportError as error:
            build = "install NVIDIA's apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
            yield problem(f"apex cannot be imported ({error})", f"{build}, or {auto}")


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return importlib.import_module(_NORMS).FusedLayerNormAffineFunction.apply(x, weight, bias, shape, eps)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return importlib.import_module(_NORMS).FusedRMSNormAffineFunction.apply(x, weight, shape, eps)


NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "torch": (torch.layer_norm, torch.rms_norm),
    "apex": (_layer_norm, _rms_norm),
}
"""Values of `kernels.norm` -> layer norm and RMS norm, called like torch's."""


def add_weight_gradient(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Add the matmul [m, k] x [k, n] to an fp32 sum, or return False if the kernel cannot read these operands."""
    # it reads [k, m] and [k, n] whatever their strides
    grad = left.t()
    fits = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32
    if not fits or not all(tensor.is_contiguous() for tensor in (grad, right, total)):
        return False
    importlib.import_module(_PRODUCT).wgrad_gemm_accum_fp32(right, grad, total)
    return True


def _adamw(
    weights: list[Tensor], *rest: list[Tensor], lr: float | Tensor, beta1: float, beta2: float, **more: Any
) -> None:
    """Update like torch's fused AdamW, for tensors with equal step counts."""
    gradients, first, second, _, steps = rest
    # a kernel is launched at the last element of the last tensor
    lists = [[tensor for tensor in each if tensor.numel()] for each in (gradients, weights, first, second)]
    if lists[0]:
        one = torch.ones(1, device=weights[0].device)
        skipped, scale = (one * 0 if more["found_inf"] is None else more["found_inf"], more["grad_scale"])
        scale = one if scale is None else scale.reshape(1).float().reciprocal()
        numbers = (one * lr, beta1, beta2, more["eps"], (steps[0] + 1).int().reshape(1))
        # with decoupled weight decay and bias correction
        importlib.import_module(_MULTI_TENSOR).multi_tensor_adam_capturable(
            CHUNK, (skipped > 0).int().reshape(1), lists, *numbers, 1, 1, more["weight_decay"], scale
        )


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    if not all(0 < tensor.numel() < LARGEST for tensor in tensors):
        return torch._foreach_norm(tensors)
    # the kernel notes in the flag that a norm is not finite
    flag = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
    return importlib.import_module(_MULTI_TENSOR).multi_tensor_l2norm(CHUNK, flag, [tensors], True)[1].unbind()


Norms = Callable[[list[Tensor]], Sequence[Tensor]]


class UpdateKernels(NamedTuple):
    """Functions of an update, called like torch's fused AdamW and like `torch._foreach_norm`."""

    adamw: Callable[..., None] = partial(adamw, fused=True)
    norms: Norms = torch._foreach_norm


UPDATES = {"torch": UpdateKernels(), "apex": UpdateKernels(_adamw, _norms)}
"""Values of `kernels.optimizer`."""
