"""A checkpoint of any layout is continued under any other, in another precision, with tensors that are frozen then.

The default is a covering array: every pair of values of two options, one before and one after the save among them.
`--all-pairs` continues every layout of up to four ranks under every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pangu.topology.layout import Layout
from pangu.training.resuming import load_checkpoint
from tests.covering import Case, Cover, all_pairs, pairs_of
from tests.parallel.cases import CHUNKS, DROPOUT, ROWS, among
from tests.parallel.harness import OVERRIDES, whole
from tests.parallel.test_zero_runs import Steps, save, train, trainer_of, two_states
from tests.threads import Ranks

MODEL = (
    *OVERRIDES,
    "model.layers=5",
    "model.hidden=16",
    "batch.global_size=12",
)
SIDES = ("before", "after")
CHECKPOINT = Path("checkpoints") / "step-00000001"
AXES = {
    "tensor": ("1", "2", "4"),
    "sequence": ("false", "true"),
    "pipeline": ("1", "2", "3", "4"),
    "schedule": ("1f1b", "interleaved", "zb_v"),
    "data": ("1", "2", "3", "4"),
    "context": ("1", "2", "4"),
    "zero": ("0", "1", "2", "3"),
    "zero_group": ("0", "2"),
}
EXPERTS = {
    "none": "",
    "global": "model.experts=4 model.expert_ffn=16 model.expert_capacity=0.8 model.router.balance=global",
    "bias": "model.experts=4 model.expert_ffn=16 model.router.balance=bias model.router.bias_rate=0.1",
}
"""What of their loads a checkpoint must bring."""
FACTORS = {
    **{f"{name} before": values for name, values in AXES.items()},
    **{f"{name} after": values for name, values in AXES.items()},
    "precision before": ("fp64", "fp32", "bf16"),
    "precision after": ("fp64", "fp32", "bf16"),
    "matmul": ("compute", "fp8"),  # its scales are those that the checkpoint's history gives
    "freezes": ("never", "always", "after"),
    "attention": ("reference", "auto"),
    "dropout": tuple(DROPOUT),
    "rows": tuple(ROWS),
    "optimizer": ("adam", "lamb", "muon"),
    "kind": ("pangu", "gpt"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu_tanh", "swiglu"),
    "positions": ("learned", "rope", "relative"),
    "tied_head": ("true", "false"),
    "biases": ("true", "false"),
    "kv_heads": ("null", "1"),  # that tensor-parallel ranks share
    "experts": tuple(EXPERTS),
}
RULES = tuple(
    rule
    for when in SIDES
    for rule in (
        among(f"sequence {when}", "true", then=f"tensor {when}", needs=("2", "4")),
        among(f"schedule {when}", "interleaved", "zb_v", then=f"pipeline {when}", needs=("2",)),
        among(f"zero_group {when}", "2", then=f"zero {when}", needs=("1", "2", "3")),
    )
)
FROZEN = "layers.1.*"


def devices(case: Mapping[str, str], when: str) -> int:
    """Ranks before or after the save, as far as they are decided."""
    tensor, pipeline, data, context = (
        int(case.get(f"{axis} {when}", 1)) for axis in ("tensor", "pipeline", "data", "context")
    )
    return tensor * pipeline * max(data * context, least(case, when))


def least(case: Mapping[str, str], when: str) -> int:
    """Replicas that share states."""
    return 4 if case.get(f"zero_group {when}") == "2" else 1 + (case.get(f"zero {when}", "0") != "0")


def replicas(case: Mapping[str, str], when: str) -> int | None:
    """None: not decided."""
    data, context = (case.get(f"{axis} {when}") for axis in ("data", "context"))
    return None if data is None or context is None else int(data) * int(context)


def spread(case: Mapping[str, str]) -> bool:
    """Four ranks at the most, and enough replicas; what single pairs do not tell."""
    enough = all(replicas(case, when) is None or least(case, when) <= replicas(case, when) for when in SIDES)
    return enough and max(devices(case, when) for when in SIDES) <= 4


def fits(case: Mapping[str, str]) -> bool:
    """Exact numbers on one side only would be compared with rounded ones."""
    exact = {case.get("precision before", "fp64") == "fp64", case.get("precision after", "fp64") == "fp64"}
    both = "precision before" in case and "precision after" in case
    return (
        all(rule(case) for rule in RULES)
        and (case.get("matmul") != "fp8" or case.get("experts", "none") == "none")
        and (len(exact) == 1 or not both)
        and spread(case)
    )


LOOKS_AT = [
    f"{axis} {when}" for axis in ("tensor", "pipeline", "data", "context", "zero", "zero_group") for when in SIDES
]
COVER = Cover(
    FACTORS,
    fits,
    cost=lambda case: 0.3 * (devices(case, "before") + devices(case, "after")),
    more=(spread, LOOKS_AT),
)


def layout_of(case: Case, when: str) -> Layout:
    def number(axis: str) -> int:
        return int(case[f"{axis} {when}"])

    sequence, chunks = case[f"sequence {when}"] == "true", CHUNKS[case[f"schedule {when}"]]
    sizes = (number("tensor"), number("pipeline"), number("data"), number("zero"))
    return Layout(*sizes, sequence, chunks, number("zero_group"), number("context"))


def micro_size(layout: Layout) -> str:
    """One micro-batch a step: how many there are is another test's."""
    return f"batch.micro_size={12 // layout.data}"


def words_of(case: Case, when: str) -> tuple[str, ...]:
    frozen = case["freezes"] == "always" or (case["freezes"] == "after" and when == "after")
    model = ("kind", "norm", "activation", "positions", "tied_head", "biases", "kv_heads")
    return (
        *MODEL,
        micro_size(layout_of(case, when)),
        f"parallel.schedule={case[f'schedule {when}']}",
        f"precision={case[f'precision {when}']}",
        f"optimizer={case['optimizer']}",
        f"model.attention={case['attention']}",
        *DROPOUT[case["dropout"]].split(),
        *ROWS[case["rows"]].split(),
        f"precision.matmul={case['matmul']}",
        f"train.frozen=[{FROZEN if frozen else ''}]",
        *(f"model.{name}={case[name]}" for name in model),
        *EXPERTS[case["experts"]].split(),
    )


def resume(rank: int, world: int, layout: Layout, checkpoint: Path, aside: str, *overrides: str) -> Steps:
    """The second step from a checkpoint of the first."""
    trainer = trainer_of(layout, f"train.output={aside}", *overrides)
    load_checkpoint(checkpoint, trainer.config, trainer)
    return two_states(trainer, 1)


def name_of(case: Case) -> str:
    """Values that differ from the first of their option."""
    return " ".join(f"{name}={value}" for name, value in case.items() if value != FACTORS[name][0]) or "standard"


@pytest.mark.parametrize("case", COVER.cases, ids=name_of)
def test_a_run_goes_on_under_another_layout(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    """Weights are loaded bit for bit, in the format in which they are kept. In fp64 the next step is, to 1e-12, that of
    the run that was not interrupted; where other tensors are frozen then, that of one process which continues the same
    checkpoint. In narrow formats losses agree to a few roundings."""
    before, after, exact = layout_of(case, "before"), layout_of(case, "after"), case["precision after"] == "fp64"
    words = words_of(case, "after")
    saved = ranks.run(before.world, save, before, str(tmp_path), 1, *words_of(case, "before"))[0]
    resumed = ranks.run(after.world, resume, after, tmp_path / CHECKPOINT, str(tmp_path / "aside"), *words)[0]
    assert resumed.first.keys() == saved.first.keys()
    assert all(torch.equal(loaded, saved.first[name].to(loaded.dtype)) for name, loaded in resumed.first.items())
    expected = saved
    if case["freezes"] == "after":
        alone = (
            Layout(),
            tmp_path / CHECKPOINT,
            str(tmp_path / "alone"),
            *words,
            "parallel.schedule=1f1b",
            micro_size(Layout()),
        )
        expected = resume(0, 1, *alone)
    assert resumed.loss == pytest.approx(expected.loss, rel=1e-12 if exact else 2e-2)
    still = {name for name, weight in resumed.second.items() if torch.equal(weight, resumed.first[name])}
    assert still == {name for name in still | saved.first.keys() if case["freezes"] != "never" and FROZEN[:-1] in name}
    if exact:
        assert max(float((resumed.second[name] - w).abs().max()) for name, w in expected.second.items()) <= 1e-12


def test_every_pair_occurs_that_can() -> None:
    """All pairs that some layout of four ranks at the most has, and all with what is not a layout."""
    possible = set()
    for values in product(*AXES.values()):
        for when in SIDES:
            case = {f"{name} {when}": value for name, value in zip(AXES, values, strict=True)}
            possible |= pairs_of(case) if fits(case) else set()
    sides = [{f"{name} {when}" for name in AXES} for when in SIDES]
    within = {pair for pair in all_pairs(FACTORS) if any({name for name, _ in pair} <= side for side in sides)}
    apart = {pair for pair in set(all_pairs(FACTORS)) - within if not fits(dict(pair))}
    # exact before and not after, or the other way round; and experts are not multiplied in fp8
    assert len(apart) == 6
    pairs = set().union(*map(pairs_of, COVER.cases))
    assert pairs == set(all_pairs(FACTORS)) - (within - possible) - apart


def layouts() -> Iterator[Layout]:
    """Every one; what makes no difference (ZeRO with one replica, for example) is left at its default."""
    for tensor, pipeline, data, context in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4)):
        if tensor * pipeline * data * context > 4:
            continue
        replicas = data * context
        for virtual_stages in (1, 2) if pipeline == 2 else (1,):
            for sequence in (False, True) if tensor > 1 else (False,):
                for zero in range(4) if replicas > 1 else (0,):
                    for group in (0, 2) if replicas == 4 and zero else (0,):
                        yield Layout(tensor, pipeline, data, zero, sequence, virtual_stages, group, context)


LAYOUTS = tuple(layouts())


def words(layout: Layout, optimizer: str) -> tuple[str, ...]:
    schedule = "interleaved" if layout.virtual_stages > 1 else "1f1b"
    more = (micro_size(layout), f"optimizer={optimizer}", f"parallel.schedule={schedule}")
    return (*MODEL, "precision=fp64", *more)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout, str], Path]:
    """A layout's checkpoint, made once."""

    @cache
    def made(layout: Layout, optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        Ranks().run(layout.world, save, layout, str(folder), 1, *words(layout, optimizer))
        return folder / CHECKPOINT

    return made


@pytest.mark.all_pairs
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_every_layout_continues_every_other(
    after: Layout, ranks: Ranks, saved: Callable[[Layout, str], Path], tmp_path: Path
) -> None:
    """fp64, the optimizers by turns."""
    for number, before in enumerate(LAYOUTS):
        optimizer = ("adam", "lamb", "muon")[number % 3]
        checkpoint, expected = saved(before, optimizer), unbroken(optimizer)
        job = (resume, after, checkpoint, str(tmp_path / str(number)), *words(after, optimizer))
        weights = ranks.run(after.world, *job)[0].second
        assert max(float((weights[name] - weight).abs().max()) for name, weight in expected.items()) <= 1e-12


@cache
def unbroken(optimizer: str) -> dict[str, Tensor]:
    """Weights after two steps on one process."""
    trainer = trainer_of(Layout(), *words(Layout(), optimizer))
    train(trainer, range(2))
    return whole(trainer, of_gradients=False)


def test_the_layouts_are_all() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 78
    assert {layout.world for layout in LAYOUTS} == {1, 2, 3, 4}
