"""What the rows of a table of measurements are read as."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_accuracy.measurements import Row, cut_by_cost, cut_evenly, read_rows
from benchmarks.planner_accuracy.published import DECODER, SYSTEMS, System
from pangu.models.size import training_flops_per_token

GPT = {
    "source": "paper", "layers": "48", "hidden": "8192", "heads": "64", "vocab": "51200", "seq": "2048",
    "gpu": "A100-80G", "gpus": "128", "tp": "8", "pp": "2", "global_batch": "64", "micro_batch": "1",
}  # fmt: skip
"""A row, by column."""


def row(folder: Path, **values: str) -> Row:
    """The row with other values."""
    whole = {**GPT, **values}
    with (path := folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(whole))
        writer.writeheader()
        writer.writerow(whole)
    rows, skipped = read_rows(path)
    assert not skipped
    return rows[0]


@pytest.mark.parametrize(
    ("values", "system"),
    [
        ({}, "megatron of 2021"),
        ({"recompute": "selective"}, "megatron of 2022"),
        ({"source": "arXiv:2104.04473"}, "megatron of 2021"),
        ({"source": "arXiv:2205.05198"}, "megatron of 2022"),
        ({"source": "arXiv:2401.10241", "table": "schedule ZB-2p"}, "deferred gradients"),
        ({"zero": "1"}, "deepspeed bf16"),
        ({"zero": "1", "note": "fp16. timed"}, "deepspeed fp16"),
        ({"note": "Megatron-DeepSpeed; fp16"}, "deepspeed fp16"),
        ({"ffn": "21824", "params_b": "39.6"}, "unfused layers"),
        ({"gpu": "H100-80G", "zero": "1"}, "megatron-core"),
        ({"gpu": "H100-80G", "zero": "2", "note": "FSDP"}, "megatron-core"),
        ({"gpu": "H100-80G", "source": "dgxc"}, "nemo"),
        ({"gpu": "H100-80G", "source": "NVIDIA-NeMo/Megatron-Bridge"}, "megatron-bridge"),
        ({"gpu": "A100-80G", "zero": "2", "source": "arXiv:2402.15627"}, "megatron-core"),
        ({"gpu": "A100-80G", "zero": "2", "source": "arXiv:2402.15627: MegaScale"}, "megascale"),
        ({"gpu": "A100-80G", "zero": "2", "source": "arXiv:2402.15627: before MegaScale"}, "before megascale"),
        ({"gpu": "H100-80G", "source": "Llama 3"}, "llama 3"),
        ({"gpu": "H100-80G", "source": "HF/nanotron"}, "nanotron"),
        ({"gpu": "V100", "source": "Oneflow-Inc"}, "oneflow"),
    ],
)
def test_programs_are_told_by_what_a_row_says(values: dict[str, str], system: str, tmp_path: Path) -> None:
    assert row(tmp_path, **values).setups[0].system == SYSTEMS[system]


def test_gated_models_have_rotary_positions_so_that_long_sequences_add_no_weights(tmp_path: Path) -> None:
    # Llama 3.1 405B, whose tables of words are two: a table of positions would weigh as much as the second one
    shape = {"layers": "126", "hidden": "16384", "heads": "128", "kv_heads": "8", "ffn": "53248", "vocab": "128256"}
    for seq in ("8192", "131072"):
        model = row(tmp_path, **shape, seq=seq, params_b="405.9", model="Llama").setups[0].model
        assert (model.positions, model.activation, model.tied_head) == ("rope", "swiglu", False)


@pytest.mark.parametrize(
    ("source", "stops"), [("llm-foundry", True), ("arXiv:2205.01068", False), ("arXiv:2410.06511", True)]
)
def test_checkpoints_stop_early_since_pytorch_2(source: str, stops: bool, tmp_path: Path) -> None:
    assert row(tmp_path, source=source, zero="3", pp="1").setups[0].system.stops_early == stops


def test_torchtitans_options_are_read(tmp_path: Path) -> None:
    def titan(note: str) -> Row:
        return row(tmp_path, gpu="H100-80G", zero="3", pp="1", note=f"FSDP2; {note}")

    def system(note: str) -> System:
        return titan(note).setups[0].system

    assert not system("eager bf16").fused
    assert system("compile bf16").fused
    assert system("bf16 vanilla TP").hidden_tensor == 0
    assert system("bf16 async TP").hidden_tensor == system("compile float8 AsyncTP").hidden_tensor == 1
    assert titan("float8 tensorwise").format == "fp8"
    assert titan("float8 rowwise").format == "bf16"


@pytest.mark.parametrize(("factor", "recompute"), [(1.0, "none"), (4 / 3, "full")])
def test_the_printed_rate_tells_of_recomputation(factor: float, recompute: str, tmp_path: Path) -> None:
    flops = training_flops_per_token(row(tmp_path).setups[0].model) * 2048 * 64
    rate = factor * flops / 128 / 10 / 1e12
    found = row(tmp_path, step_time_s="10", tflops_per_gpu=str(rate))
    assert found.setups[0].plan.recompute == recompute
    told = row(tmp_path, step_time_s="10", tflops_per_gpu=str(rate), recompute="none")
    assert told.setups[0].plan.recompute == "none"


def test_a_printed_rate_may_count_the_causal_half_of_attention(tmp_path: Path) -> None:
    known = {"seq": "8192", "recompute": "none", "tflops_per_gpu": "100"}
    model = row(tmp_path, **known).setups[0].model
    half = training_flops_per_token(replace(model, sequence=4096)) / training_flops_per_token(model)
    found = row(tmp_path, **known, note="causal half").seconds
    assert found == pytest.approx(half * row(tmp_path, **known).seconds)


@pytest.mark.parametrize(
    ("values", "chunks"),
    [
        ({}, 1),
        ({"vpp": "4"}, 4),
        ({"note": "interleaved schedule"}, 2),
        ({"layers": "42", "pp": "2", "note": "interleaved schedule"}, 3),
        ({"layers": "41", "pp": "2", "note": "interleaved schedule"}, 1),
        ({"gpu": "H100-80G", "pp": "8"}, 1),
        ({"gpu": "H100-80G", "pp": "8", "layers": "62", "vpp": "8"}, 8),
    ],
)
def test_chunks_that_are_not_told(values: dict[str, str], chunks: int, tmp_path: Path) -> None:
    assert {setup.plan.virtual_stages for setup in row(tmp_path, **values).setups} == {chunks}


def test_scripts_of_published_runs_say_what_a_table_leaves_out(tmp_path: Path) -> None:
    # Megatron-LM, examples/sc21/run_table_1.sh; what the table says itself stays
    source = {"source": "arXiv:2104.04473 (Megatron SC21)", "pp": "8", "gpus": "1536", "global_batch": "2304"}
    for model, micro, told in (("GPT-145.6B", "", (2, 2)), ("GPT-145.6B", "4", (4, 2)), ("GPT-39.1B", "", (4, 1))):
        (one,) = row(tmp_path, **source, model=model, micro_batch=micro, vpp="", note="interleaved").setups
        assert (one.plan.micro_size, one.plan.virtual_stages) == told


def test_fp8_doubles_the_rate_of_the_layers_matmuls_alone(tmp_path: Path) -> None:
    half, eighth = (row(tmp_path, gpu="H100-80G", note=note) for note in ("", "fp8"))
    rates, faster = half.cluster.matmul, eighth.cluster.matmul
    assert (faster.tflops, faster.attention) == (rates.tflops, rates.attention)
    newer = row(tmp_path, gpu="GB300", note="fp8").cluster.matmul
    # no more than the data sheets' 2; Hopper's sums need help
    assert 1.5 < faster.tflops_fp8 / rates.tflops < newer.tflops_fp8 / newer.tflops < 2
    assert (half.setups[0].fp8, eighth.setups[0].fp8) == (False, True)


def test_torchao_computes_scales_from_the_tensors_themselves(tmp_path: Path) -> None:
    systems = [row(tmp_path, source=source, zero="3").setups[0].system for source in ("torchtitan", "llm-foundry")]
    assert [system.rescales for system in systems] == [True, False]


def test_an_h100_with_hbm2e_reads_memory_slower(tmp_path: Path) -> None:
    assert row(tmp_path, gpu="H100-96G-HBM2e-500W").cluster.memory.gb_s == 2400.0
    assert row(tmp_path, gpu="H100-80G").cluster.memory.gb_s == 3350.0


def test_stages_are_cut_by_what_they_compute() -> None:
    # a head that weighs as much as four layers fills the last of four stages
    model = replace(DECODER, layers=16, hidden=2048, heads=32, vocab=131072, activation="swiglu")
    assert cut_by_cost(model, 1) == (16,)
    assert cut_by_cost(replace(model, vocab=1), 4) == (5, 4, 4, 3)
    assert cut_by_cost(model, 4) == (6, 5, 5, 0)


def test_chunks_are_even_and_ends_may_count_as_layers() -> None:
    assert cut_evenly(10, 4, False) == (3, 3, 2, 2)
    assert cut_evenly(10, 4, True) == (2, 3, 3, 2)
    assert cut_evenly(10, 1, True) == (10,)
