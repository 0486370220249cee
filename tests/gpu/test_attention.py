"""What torch's flash attention drops over documents, for which the operator has no CPU kernel; what kernels are chosen
by."""

from __future__ import annotations

import time

import pytest
import torch

from pangu.layers.attention import AttentionCore
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import can_run
from pangu.layers.kernels import QKV, MaskAndBias, kernel_named
from pangu.layers.masks import AttentionMask
from pangu.metrics.timing import time_candidates
from pangu.topology.launch import Launch, choose_device
from pangu.topology.placement import PlacementTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not can_run("flash", torch.device("cuda")), reason="needs torch's flash attention"),
]


def test_what_is_dropped_over_documents() -> None:
    """One-hot values read the probabilities that were left, and a one-hot gradient of the output those of backward:
    they are the same, the reference's scaled by 1 / 0.7 where they are not zero, in a recompute as well."""
    device, length, heads = choose_device("auto", Launch()), 64, 4
    documents = torch.zeros(2, length, dtype=torch.int64, device=device)
    documents[0, 20:] = 1
    bounds = torch.tensor([0, 20, length, 2 * length, 2 * length], dtype=torch.int32, device=device)
    terms = MaskAndBias(AttentionMask(documents, None, bounds), None, length, torch.bfloat16, device)
    query, key = torch.randn(2, 2, heads, length, length, device=device, dtype=torch.bfloat16)
    one_hot = torch.eye(length, device=device, dtype=torch.bfloat16).expand(2, heads, -1, -1)
    value = one_hot.clone().requires_grad_()
    keys = DropoutKeys(1, 2, (3, 4)).on(torch.zeros(2, length, device=device))
    kernel, build = kernel_named("flash")(terms), Builder(PlacementTable())
    left, _ = AttentionCore(build, 0.3)(QKV(query, key, value), kernel, keys)
    (back,) = torch.autograd.grad(left, value, one_hot)
    torch.testing.assert_close(back.mT, left)
    again, _ = AttentionCore(build, 0.3, recompute=True)(QKV(query, key, value), kernel, keys)
    assert torch.equal(again, left)
    (back,) = torch.autograd.grad(again, value, one_hot)
    torch.testing.assert_close(back.mT, left)
    whole, _ = AttentionCore(build, 0.0)(QKV(query, key, one_hot), kernel_named("reference")(terms), None)
    kept = left != 0
    torch.testing.assert_close(left[kept], whole[kept] / 0.7, atol=0.01, rtol=0.02)
    assert kept[whole > 1e-3].float().mean() == pytest.approx(0.7, abs=0.03)


def test_a_candidate_is_timed_by_the_device() -> None:
    """Not by the host, which is busy for longer."""
    times = time_candidates({"host": lambda: time.sleep(1e-4)}, choose_device("auto", Launch()), 1.0)
    assert 0 <= times["host"] < 5e-5
