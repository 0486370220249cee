"""Copies in the memory of nodes survive any one node, and damage leads to the generation before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pangu.checkpoint.files import (
    Slice,
    Written,
    checkpoint_path,
    commit,
    list_checkpoints,
    partial_of,
    start,
    write_slices,
)
from pangu.checkpoint.index import read_index
from pangu.checkpoint.memory import (
    LocalGeneration,
    buddies,
    commit_kept,
    kept_parts,
    local_generations,
    newest_complete,
    newest_kept,
    transfers,
    write_part,
)
from pangu.checkpoint.reading import load

NODES = [0, 0, 2, 2, 4, 4]
"""First rank on the node of each rank."""


@given(st.integers(2, 5), st.integers(1, 4))
def test_a_buddy_is_on_another_node_and_keeps_one_copy(nodes: int, size: int) -> None:
    places = [rank // size for rank in range(nodes * size)]
    found = buddies(places)
    assert sorted(found) == list(range(nodes * size))
    assert all(places[rank] != places[buddy] for rank, buddy in enumerate(found))


def test_nodes_may_differ_in_size_or_be_alone() -> None:
    assert buddies([0, 0, 0, 3]) == [3, 3, 3, 0]
    assert buddies([0, 0]) == [0, 1]


def value(step: int) -> torch.Tensor:
    return torch.arange(24.0).view(12, 2) + 100 * step


def save(root: Path, step: int) -> None:
    """Write a generation: each rank two rows on its node, and a copy of its file on its buddy's."""
    parts: list[Written] = []
    for node in set(NODES):
        start(checkpoint_path(root / str(node), step))
    for rank, buddy in enumerate(buddies(NODES)):
        part = Slice(value(step)[2 * rank : 2 * rank + 2], (12, 2), (2 * rank, 0))
        for node in (NODES[rank], NODES[buddy]):
            written = write_slices(checkpoint_path(root / str(node), step), rank, [("weight/a", part)])
        parts.append(written)
    for node in set(NODES):
        commit(checkpoint_path(root / str(node), step), parts, {"step": step})


def look(root: Path) -> tuple[list[LocalGeneration], list[str]]:
    looks = [
        local_generations(list_checkpoints(root / str(node)), node, share, 2)
        for node in set(NODES)
        for share in range(2)
    ]
    return [one for held, _ in looks for one in held], [line for _, lines in looks for line in lines]


def restored(root: Path, step: int, _: str, places: dict[str, set[int]]) -> torch.Tensor:
    """Return the tensor that a new node loads after it has fetched all files from where they are."""
    path, index = checkpoint_path(root / "new", step), "index.json"
    path.mkdir(parents=True)
    plan = transfers(places, [*NODES, -1], [()] * len(NODES) + [places])
    assert sorted(name for name, *_ in plan) == sorted(places)
    for name, sender, receiver in plan:
        assert receiver == len(NODES)
        shutil.copy(checkpoint_path(root / str(NODES[sender]), step) / name, path / name)
        shutil.copy(checkpoint_path(root / str(NODES[sender]), step) / index, path)
    tensor = torch.full((12, 2), -1.0)
    load(path, read_index(path), [("weight/a", Slice(tensor, (12, 2), (0, 0)))])
    return tensor


@pytest.mark.parametrize("lost", sorted(set(NODES)))
def test_any_one_node_may_be_lost(lost: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / str(lost))
    found = newest_complete(look(tmp_path)[0])
    assert found is not None
    assert found[0] == 2
    assert torch.equal(restored(tmp_path, *found), value(2))


def test_two_neighbors_that_are_lost_leave_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "0")
    shutil.rmtree(tmp_path / "2")
    assert newest_complete(look(tmp_path)[0]) is None


def test_damage_is_named_and_the_other_copy_or_the_older_generation_is_used(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    name = "tensors-00000-00000.safetensors"
    for node, step in ((0, 2), (2, 1)):
        file = checkpoint_path(tmp_path / str(node), 2) / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        held, problems = look(tmp_path)
        found = newest_complete(held)
        assert found is not None
        assert found[0] == step
        assert any(str(file) in line and "checksum" in line for line in problems)
    assert torch.equal(restored(tmp_path, *found), value(1))


def test_the_older_generation_stands_in_for_one_that_a_node_did_not_commit(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint_path(tmp_path / "0", 2)
    path.rename(path.with_name(".step-00000002.partial"))
    found = newest_complete(look(tmp_path)[0])
    assert found is not None
    assert found[0] == 2, "nodes 2 and 4 hold every file"
    shutil.rmtree(tmp_path / "2")
    found = newest_complete(look(tmp_path)[0])
    assert found is not None
    assert found[0] == 1, "files of ranks 0 and 1 are only in the uncommitted folder of generation 2"
    assert torch.equal(restored(tmp_path, *found), value(1))


def keep(root: Path, step: int, ranks: list[int], problem: str = "") -> None:
    """Let ranks keep the state of a step, each two rows on its node, without having met."""
    for rank in ranks:
        folder = partial_of(root / str(NODES[rank]) / f"kept-run-0-{step:08d}")
        folder.mkdir(parents=True, exist_ok=True)
        part = Slice(value(step)[2 * rank : 2 * rank + 2], (12, 2), (2 * rank, 0))
        written = write_slices(root / str(NODES[rank]) / f"kept-run-0-{step:08d}", rank, [("weight/a", part)])
        unread = {"numbers": [], "fields": [], "lr": 0.1, "seconds": 1.0, "stragglers": None}
        details = {"padding": 0.5, "trust_ratios": {f"weight/{rank}": rank / 8}}
        facts = {"step": step, "unread": {**unread, "details": details}}
        part_facts = {"step": step, "rank": rank, "writers": [*range(6)], "problem": problem, "facts": facts}
        write_part(folder, {**part_facts, "tensors": written.tensors, "files": written.files})


def kept(root: Path) -> tuple[list[Mapping[str, Any]], str]:
    return newest_kept(part for node in set(NODES) for part in kept_parts(root / str(node)))


def test_what_ranks_keep_is_a_generation_once_each_has_written_its_part(tmp_path: Path) -> None:
    save(tmp_path, 1)
    keep(tmp_path, 3, [0, 1, 2, 3, 5])
    assert kept(tmp_path) == ([], "the state of step 3 is incomplete: rank 4 has not written its part")
    keep(tmp_path, 2, [*range(6)])
    parts, problem = kept(tmp_path)
    assert ([part["rank"] for part in parts], problem) == ([*range(6)], "")
    for node in set(NODES):
        commit_kept(checkpoint_path(tmp_path / str(node), 2), parts)
    held, problems = look(tmp_path)
    assert not problems
    assert (found := newest_complete(held)) is not None
    assert (restored(tmp_path, *found) == value(2)).all()
    ratios = {f"weight/{rank}": rank / 8 for rank in range(6)}
    details = read_index(checkpoint_path(tmp_path / "0", 2))["unread"]["details"]
    assert details == {"padding": 0.5, "trust_ratios": ratios}, "each rank knows the ratios of its own tensors"


def test_damage_of_what_ranks_keep_leads_to_the_generation_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    keep(tmp_path, 2, [*range(6)])
    (part,) = (tmp_path / "2").glob(".kept-*/part-00003.json")
    part.write_text(part.read_text().replace('"step": 2', '"step": 9', 1))
    assert kept(tmp_path) == ([], "the state of step 2 is incomplete: rank 3 has not written its part")
    write_part(part.parent, {"rank": 3, "step": 2})  # of another version
    assert kept(tmp_path) == ([], "the state of step 2 is incomplete: rank 3 has not written its part")
    keep(tmp_path, 2, [3])
    parts, _ = kept(tmp_path)
    for node in set(NODES):
        commit_kept(checkpoint_path(tmp_path / str(node), 2), parts)
    file = checkpoint_path(tmp_path / "2", 2) / "tensors-00002-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    held, problems = look(tmp_path)
    assert "tensors-00002-00000.safetensors: damaged: checksum mismatch" in problems[0]
    assert (found := newest_complete(held)) is not None
    assert (restored(tmp_path, *found) == value(1)).all()


def test_ranks_say_why_they_keep_nothing(tmp_path: Path) -> None:
    keep(tmp_path, 2, [*range(6)], "only rank 6 held part of it")
    assert kept(tmp_path) == ([], "the state of step 2 is incomplete: only rank 6 held part of it")
