"""Compiled layers: each is one graph, or few where something in it cannot be traced; layers of a kind share them, and
they compute what the layers do.

torch traces and differentiates as for its compiler, but most of these tests run the graph as it stands: to make C++ of
it takes a minute."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile

from pangu.common.errors import ConfigError, LocalError, allocating
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernels import Reference
from pangu.models import compiled
from pangu.models.compiled import ways
from pangu.topology.layout import Layout
from pangu.training import step
from tests.covering import Case, with_every_value
from tests.parallel.cases import FACTORS, LATENT_NEEDS, MODEL, RECOMPUTE, equals_one_process, keys_of, name_of
from tests.parallel.harness import OVERRIDES, small_trainer, whole
from tests.parallel.test_layouts import COVER
from tests.threads import Ranks

pytestmark = pytest.mark.usefixtures("empty_compiler")
TRACED = "aot_eager_decomp_partition"
"""What the compiler begins with: forward and backward in simple operations, divided between the two."""
MODES = ("one_layer", "selective", "full", "none")
FIRST = {name: values[0] for name, values in FACTORS.items()}
THREE = {  # the ways of a gradient of a matrix to where it belongs: autograd, a split backward, the product itself
    "autograd": {"tensor": "2", "sequence": "true", "data": "2", "zero": "3", "recompute": "selective"},
    "split": {"tensor": "2", "pipeline": "2", "schedule": "zb_h1", "recompute": "one_layer", "frozen": "scattered"},
    "product": {"pipeline": "2", "schedule": "zb_v", "data": "2", "zero": "2", "frozen": "bottom", "products": "true"},
}
MORE = {
    "autograd": {"overlap_chunks": "3", "offload": "activations", "qk_norm": "true", "residual_scores": "true"},
    "split": {"sequence": "true", "loss_chunk": "5", "norm_placement": "post", "activation": "swiglu"},
    "product": {"tensor": "2", "recompute": "full", "kind": "gpt", "micro_batches": "3", "matmul": "fp8"},
}

PARTS: dict[str, Case] = {  # several graphs: attention over ranks and experts, keys that ranks share
    "experts": {"context": "2", "context_kind": "ring", "experts": "4", "shared_experts": "2", "expert": "2"}
    | {"zero": "3", "recompute": "selective"},
    "keys": {"tensor": "2", "sequence": "true", "latent": "full", **LATENT_NEEDS, "recompute": "full"},
}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def gradients(*overrides: str) -> dict[str, Tensor]:
    trainer, batches = small_trainer(Layout(), "precision=fp64", *overrides)
    trainer.forward_backward(batches)
    return whole(trainer, of_gradients=True)


@pytest.mark.parametrize(("number", "latent"), [*((number, "null") for number in range(4)), (1, "full"), (2, "direct")])
def test_a_layer_is_one_graph_whatever_the_options_of_the_model(number: int, latent: str) -> None:
    """Every value of each in some of six models. The graph is what is done without it, in the same order."""
    chosen = {name: FACTORS[name][number % len(FACTORS[name])] for name in MODEL}
    chosen |= {"latent": latent} | (LATENT_NEEDS if latent != "null" else {})
    chosen["parallel_block"] = "true" if (chosen["kind"], chosen["norm_placement"]) == ("gpt", "pre") else "false"
    chosen["full_layers"] = chosen["full_layers"] if chosen["window"] != "null" else "null"
    recompute = MODES[number]
    words = [*keys_of({**FIRST, **chosen})[0], "model.layers=4", *RECOMPUTE[recompute].split()]
    with patch.object(compiled, "BACKEND", "eager"):
        found = gradients(*words, "compile=true")
    # others have a query, no window, recompute, or scores from the layer below; shared experts are one more
    more = (("kind", "pangu"), ("residual_scores", "true"), ("full_layers", "2"), ("full_layers", "[0]"))
    shared = chosen["experts"] != "null" and chosen["shared_experts"] != "0"
    assert graphs() <= 1 + shared + (recompute == "one_layer") + sum(chosen[name] == value for name, value in more)
    for name, gradient in gradients(*words).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), 2),  # five layers, and the query layer
        (("model.experts=4", "model.shared_experts=1", "model.expert_every=2"), 4),  # attention, and what is shared
        (("optimizer=muon", "optimizer.qk_clip=0.02"), 3),  # before attention, in the query layer too, and behind it
    ],
)
def test_layers_steps_and_micro_batches_share_graphs(more: tuple[str, ...], expected: int) -> None:
    words = (*OVERRIDES, "model.layers=6", "batch.micro_size=2", "compile=true", *more)
    with patch.object(compiled, "BACKEND", "eager"):
        trainer, batches = small_trainer(Layout(), *words)
        for _ in range(3):
            trainer.train_step(batches)
    assert len(batches) == 4
    assert graphs() == expected


def test_a_kernel_of_another_package_runs_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package(Reference):
        def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
            assert not torch.compiler.is_compiling()
            return super().__call__(*arguments)

    monkeypatch.setitem(KERNELS, "flash_attn", Package)
    monkeypatch.setattr(step, "kernels_of", lambda *_: ["flash_attn"])
    with patch.object(compiled, "BACKEND", "eager"):
        found = gradients(*OVERRIDES, "compile=true")
    assert graphs() == 3
    for name, gradient in gradients(*OVERRIDES).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14, msg=name)


def same_run(ranks: Ranks, case: Case, backend: str) -> None:
    """A layout with compiled layers and one process without, number by number."""
    with patch.object(compiled, "BACKEND", backend):
        equals_one_process(ranks, case, "compile=true")
    assert graphs() > 0


@pytest.mark.parametrize("way", THREE)
def test_a_layout_with_compiled_layers_is_one_process(ranks: Ranks, way: str) -> None:
    same_run(ranks, {**FIRST, **THREE[way], **MORE[way]}, TRACED)


@pytest.mark.parametrize("way", PARTS)
def test_a_layout_whose_layers_are_several_graphs_is_one_process(ranks: Ranks, way: str) -> None:
    same_run(ranks, {**FIRST, **PARTS[way]}, TRACED)


@pytest.mark.long
@pytest.mark.parametrize("case", with_every_value(COVER.cases), ids=name_of)
def test_every_option_with_compiled_layers_is_one_process(ranks: Ranks, case: Case) -> None:
    same_run(ranks, case, TRACED)


@pytest.mark.slow
def test_the_compiler_leaves_postponed_gradients_what_they_need(ranks: Ranks) -> None:
    """Its own code, with tensor and sequence parallelism and a backward that is split."""
    case = {**FIRST, **THREE["split"], "sequence": "true", "kind": "gpt", "frozen": "nothing", "recompute": "selective"}
    same_run(ranks, case, "inductor")


def test_a_kernel_draws_the_masks_that_it_draws_without() -> None:
    """In the recompute too. Here as the compiler is told to: by torch's own generator, seeded before each layer."""
    words = (*OVERRIDES, "model.attention=sdpa", "model.kind=gpt", "memory.recompute=selective")
    with patch.object(compiled, "BACKEND", TRACED), inductor_config.patch(fallback_random=True):
        found = gradients(*words, "compile=true")
    for name, gradient in gradients(*words).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14, msg=name)


def kept_bytes(*overrides: str) -> int:
    """What a forward leaves in memory for backward."""
    trainer, batches = small_trainer(
        Layout(), *OVERRIDES, "model.kind=gpt", "model.hidden=64", "model.layers=4", "batch.global_size=2", *overrides
    )
    trainer.forward_backward(batches)  # compiles
    ((part,), batch) = trainer.runner.parts.values(), batches[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        states = trainer.model(part, None, batch, DropoutKeys(1, 1, batch.samples))
    assert states.hidden.requires_grad
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(
    "recompute", ["selective", *(pytest.param(m, marks=pytest.mark.long) for m in ("none", "full"))]
)
def test_the_compiler_keeps_no_more_for_backward(recompute: str) -> None:
    """But keys of dropout, which are a hundredth in layers as narrow as these."""
    with patch.object(compiled, "BACKEND", TRACED):
        found = kept_bytes(f"memory.recompute={recompute}", "compile=true")
    assert graphs() == 1
    assert 0 < found < 1.02 * kept_bytes(f"memory.recompute={recompute}")


def test_attention_with_sinks_is_recomputed() -> None:
    """By a fused kernel, whose node torch cannot trace in what it recomputes."""
    words = ("model.attention_sinks=true", "model.attention=sdpa", "model.kind=gpt", "memory.recompute=full")
    with patch.object(compiled, "BACKEND", TRACED):
        found = gradients(*words, "compile=true")
    for name, gradient in gradients(*words).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("more", ["optimizer=muon optimizer.qk_clip=0.02", "model.experts=4 model.shared_experts=1"])
def test_a_norm_of_both_sublayers_keeps_its_output_once(more: str) -> None:
    """Though each of the graphs around what is not traced computes it."""
    words = ("model.parallel_block=shared_norm", *more.split())
    with patch.object(compiled, "BACKEND", TRACED):
        found = kept_bytes("compile=true", *words)
    assert graphs() == 2
    assert 0 < found < 1.01 * kept_bytes(*words)


def test_layers_without_gradients_are_not_recomputed() -> None:
    """Below the first that is trained, with dropout in a kernel, which torch refuses to recompute there."""
    words = (*OVERRIDES, "model.attention=sdpa", "model.kind=gpt", "memory.recompute=selective")
    with patch.object(compiled, "BACKEND", TRACED), inductor_config.patch(fallback_random=True):
        found = gradients(*words, "train.frozen=[embedding.*,layers.0.*,layers.1.*]", "compile=true")
    plain = gradients(*words, "train.frozen=[embedding.*,layers.0.*,layers.1.*]")
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ("position_bias", ("model.kind=gpt", "model.positions=relative")),
        ("query_embedding", ("model.kind=pangu",)),
    ],
)
def test_a_frozen_layer_passes_gradients_to_its_other_inputs(trained: str, words: tuple[str, ...]) -> None:
    """To tables outside the layers, whose values do not come with the hidden states."""
    keys = (*OVERRIDES, *words, "train.frozen=[embedding.*,layers.*,*_norm.*]")
    plain = gradients(*keys)
    with patch.object(compiled, "BACKEND", "eager"):
        found = gradients(*keys, "compile=true")
    (name,) = plain
    assert name == f"{trained}.weight"
    assert plain[name].any()
    torch.testing.assert_close(found[name], plain[name], rtol=0, atol=1e-14)


def test_where_nothing_can_be_compiled_a_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    assert ways(True, torch.device("cpu")) == ["true"]
    assert ways("auto", torch.device("cpu")) == ["false", "true"]

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match=r"compile = true: no C\+\+ compiler found .*; set compile=false"):
        ways(True, torch.device("cpu"))
    monkeypatch.setattr(compiled, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="compile = true: torch has no Triton for cuda here"):
        ways(True, torch.device("cuda"))
    assert ways("auto", torch.device("cpu")) == ways("auto", torch.device("cuda")) == ["false"]


def test_a_compiler_that_fails_is_named() -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no room for C++")

    with patch.object(compiled, "BACKEND", broken):
        trainer, batches = small_trainer(Layout(), "compile=true")
    with pytest.raises(LocalError, match=r"a layer cannot be compiled \(.*no room for C\+\+.*set compile=false"):
        trainer.train_step(batches)


def test_a_compiler_that_finds_no_memory_is_not_blamed() -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    with patch.object(compiled, "BACKEND", full):
        trainer, batches = small_trainer(Layout(), "compile=true")
    said = r"^here: out of memory, 2\.00 GiB requested; less$"
    with pytest.raises(LocalError, match=said), allocating(lambda: "here", "less"):
        trainer.train_step(batches)
