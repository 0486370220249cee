"""What is fitted to measurements, and to which rows it is applied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.planner_accuracy import accuracy
from benchmarks.planner_accuracy.accuracy import (
    TIMES,
    Factors,
    Fitted,
    fit_rows,
    fitted_for,
    log_errors,
    pooled,
    predict,
)
from benchmarks.planner_accuracy.measurements import CLUSTERS, Row
from benchmarks.planner_accuracy.published import RULES
from tests.planner_accuracy.test_measurements import row


def measured(folder: Path, devices: int, stall: float = 0.0) -> list[Row]:
    """Rows that take as long as the model says, and `stall` seconds more for each message."""
    found = []
    for stages in (2, 4, 8):
        for size in (1, 2, 4, 8):
            one = row(
                folder, source="nanotron", gpu="H100-80G", gpus=str(devices), pp=str(stages), micro_batch=str(size),
                global_batch=str(4 * devices), params_b="39",
            )  # fmt: skip
            messages = one.setups[0].plan.micro_batches * 2 * (stages - 1) / stages
            found.append(one._replace(seconds=predict(one, Fitted()).seconds + stall * messages))
    return found


def test_messages_that_wait_on_so_many_nodes_are_told_from_figures(tmp_path: Path) -> None:
    few, many = measured(tmp_path, 64), measured(tmp_path, 512, 1.0)
    fitted = fit_rows([*few, *few[:4], *many])
    assert fitted.stalls == {"64 send": pytest.approx(1.0, rel=0.15)}


def test_gradients_that_wait_on_so_many_nodes_wait_as_long_as_most_do(tmp_path: Path) -> None:
    plain = [
        row(tmp_path, gpu="H100-80G", pp="1", gpus=devices, micro_batch=size)
        for devices in ("64", "128", "512")
        for size in "1248" * 4
    ]
    # of the runs on 64 nodes a quarter does not wait, a quarter a second, the others several
    waits = (0, 1, 4, 9)
    rows = [
        one._replace(seconds=predict(one, Fitted()).seconds + (waits[place // 4 % 4] if one.nodes == 64 else 0))
        for place, one in enumerate(plain)
    ]
    stalls = fit_rows(rows).stalls
    assert stalls == {"64 all_reduce": pytest.approx(1.0, rel=0.15)}
    once = predict(plain[-1], Fitted(stalls=stalls)).seconds - predict(plain[-1], Fitted()).seconds
    assert once == pytest.approx(stalls["64 all_reduce"])
    piped = row(tmp_path, gpu="H100-80G", gpus="512", pp="8")
    assert predict(piped, Fitted(stalls=stalls)) == predict(piped, Fitted())


def test_many_rows_of_one_source_move_its_figures_farther_than_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [one._replace(seconds=1.2 * (one.seconds or 0)) for one in measured(tmp_path, 64)]

    def left(rows: list[Row]) -> float:
        """Mean error that the figures leave."""
        return fmean(map(abs, log_errors(rows, Fitted(times=fit_rows(rows).times))))

    many, few = left(rows), left(rows[:9])
    monkeypatch.setattr(RULES, "wider", 1.0)
    assert many < 0.8 * left(rows)
    assert few == left(rows[:9])


def test_a_row_that_takes_twice_as_long_as_its_like_moves_no_figure(tmp_path: Path) -> None:
    rows = measured(tmp_path, 64)[:6]
    odd = rows[5]._replace(seconds=20 * (rows[5].seconds or 0))
    fitted = fit_rows([*rows[:5], odd])
    assert list(fitted.times.values()) == pytest.approx([1.0] * len(fitted.times), rel=0.02)


def test_rows_that_take_longer_than_many_of_their_like_move_no_figure(tmp_path: Path) -> None:
    rows = [row for devices in (64, 128, 256, 512) for row in measured(tmp_path, devices)]
    late = [row._replace(seconds=1.3 * (row.seconds or 0)) for row in rows[::6]]
    fitted = fit_rows([*rows, *late])
    assert list(fitted.times.values()) == pytest.approx([1.0] * len(fitted.times), rel=0.01)


def test_a_slow_network_tells_little_of_sources_that_were_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(tmp_path, gpu="H100-80G", pp="1", gpus=gpus)._replace(seconds=1.0) for gpus in ("64", "128")]
    widths: list[Factors] = []
    monkeypatch.setattr(accuracy, "fit", lambda _, freedom: widths.append(freedom) or dict.fromkeys(freedom, 1.0))
    fit_rows(rows)
    pooled({rows[0].scope: rows})
    assert widths[0] == TIMES
    links = {name: width / 2 for name, width in TIMES.items() if name.startswith("between")}
    assert links
    assert widths[-1] == {**TIMES, **links}


def test_times_and_memory_come_from_the_nearest_fit_that_tells_of_them(tmp_path: Path) -> None:
    one = row(tmp_path, gpus="16")
    own = Fitted("paper", "A100-80G", "bf16", rows=4, memory={"memory.fragmentation": 2.0})
    factors = {"launch_us": 3.0}, {"memory.fragmentation": 4.0}
    other = Fitted("*", "A100", "bf16", one.setups[0].system.name, 20, *factors)
    assert fitted_for(one, [own, other]) == replace(other, memory=own.memory)
    assert fitted_for(one, [other]) == other
    assert fitted_for(one._replace(format="fp8"), [own, other]) == Fitted()
    eager = replace(other, program="fsdp")
    assert fitted_for(one, [eager]) == Fitted()  # kernels that are not Megatron's say nothing of it
    assert fitted_for(one, [replace(other, program="megatron-core")]).times == other.times


def test_the_smaller_a100_reads_memory_slower(tmp_path: Path) -> None:
    small, large = (row(tmp_path, gpu=f"A100-{size}G").cluster.memory for size in (40, 80))
    assert (small.gib, small.gb_s) == (39.4, 1555.0)
    assert large.gb_s == 2039.0


@pytest.mark.parametrize(("tensor", "size", "gib"), [("1", "2", 10.807), ("8", "16", 6.117)])
def test_oneflows_memory_is_what_its_program_keeps(tensor: str, size: str, gib: float, tmp_path: Path) -> None:
    sizes = {"layers": "16", "hidden": "1536", "heads": "16", "pp": "1", "micro_batch": size, "global_batch": size}
    one = row(tmp_path, source="Oneflow-Inc", gpu="V100", gpus=tensor, tp=tensor, recompute="full", **sizes)
    assert predict(one, Fitted()).memory == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "file", "products", "links"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 1.0, 1.0),
        ("h800", "h100", 1.0, 4 / 9),
        ("A800-SXM4-80GB", "a100", 1.0, 2 / 3),
        ("B200", "gb200", 0.9, 1.0),
        ("GB200", "gb200", 1.0, 1.0),
        ("Huawei Ascend 910", "ascend910", 1.0, 1.0),
    ],
)
def test_devices_are_known_by_their_kin(gpu: str, file: str, products: float, links: float, tmp_path: Path) -> None:
    cluster, kin = row(tmp_path, gpu=gpu).cluster, CLUSTERS[file]
    assert cluster.name == file
    assert cluster.matmul.tflops == pytest.approx(kin.matmul.tflops * products)
    assert cluster.inside.gb_s == pytest.approx(kin.inside.gb_s * links)
