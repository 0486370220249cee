"""Generations of checkpoints in the memory of nodes: each file lies on two nodes, so that one of them may be lost.

    node 0: step-00000100/   index.json, tensors-00000-*, tensors-00001-* (its ranks), tensors-00002-*, tensors-00003-*
    node 1: step-00000100/   index.json, tensors-00002-*, tensors-00003-* (its ranks), tensors-00000-*, tensors-00001-*

A generation on a node is a checkpoint folder (`files.py`) with the whole index and some of the files. It is committed,
verified and loaded as one on a disk is, by any layout. It counts if the nodes that are left hold all its files intact.

When a rank is lost, the surviving ranks keep the state of their last step the same way (`training.survivors`). Their
process groups are gone, so each writes its part of the index next to its files; the ranks of the next epoch commit it:

    node 0: .kept-RUN-0-00000107.partial/   part-00000.json, tensors-00000-00000.safetensors
"""

from __future__ import annotations

import json
import shutil
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pangu.checkpoint.files import Written, checksum, commit, partial_of, step_of
from pangu.checkpoint.index import find_damage, read_index
from pangu.common.errors import UserError, writing
from pangu.common.files import read_json_object, write_atomically


def buddies(nodes: Sequence[int]) -> list[int]:
    """Return the rank on the next node that keeps a copy of each rank's files, given the node of each rank.

    It has the same place on its node, so that every rank of equal nodes sends and receives one copy, in any layout.
    On a single node each rank is its own buddy.
    """
    ranks_of = {node: [rank for rank, its in enumerate(nodes) if its == node] for node in dict.fromkeys(nodes)}
    order = list(ranks_of)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [
        ranks_of[following[node]][ranks_of[node].index(rank) % len(ranks_of[following[node]])]
        for rank, node in enumerate(nodes)
    ]


@dataclass(frozen=True)
class LocalGeneration:
    """Intact files of a generation that a node holds."""

    node: int
    step: int
    index: str
    """Checksum of the index: generations of one step from two courses of a run are not mixed."""
    files: frozenset[str]
    num_files: int
    """Files of the whole generation."""


def local_generations(
    paths: Iterable[Path], node: int, share: int, shares: int
) -> tuple[list[LocalGeneration], list[str]]:
    """Return the generations at `paths` of a node, and their damage; each of `shares` processes reads its share."""
    found, problems = [], []
    for path in paths:
        try:
            index = read_index(path)
        except UserError as error:
            problems.append(str(error))
            continue
        intact = set()
        for name in sorted(name for name in index["files"] if (path / name).exists())[share::shares]:
            lines = find_damage(path, {**index, "files": {name: index["files"][name]}})
            problems += lines
            intact |= set() if lines else {name}
        found.append(LocalGeneration(node, step_of(path), checksum(index), frozenset(intact), len(index["files"])))
    return found, problems


def newest_complete(held: Iterable[LocalGeneration]) -> tuple[int, str, dict[str, set[int]]] | None:
    """Return step and index of the newest generation with all files on some node, and the nodes of each; else None."""
    generations = defaultdict(list)
    for one in held:
        generations[one.step, one.index].append(one)
    for (step, index), parts in sorted(generations.items(), reverse=True):
        names = sorted(set().union(*(part.files for part in parts)))
        if len(names) == parts[0].num_files:
            return step, index, {name: {part.node for part in parts if name in part.files} for name in names}
    return None


def transfers(
    places: Mapping[str, set[int]], nodes: Sequence[int], needs: Sequence[Iterable[str]]
) -> list[tuple[str, int, int]]:
    """Return (file, sending rank, receiving rank) for the files that ranks need and their nodes lack.

    `places`: nodes that hold each file; `nodes`: node of each rank; `needs`: files that each rank reads.
    """
    plan: list[tuple[str, int, int]] = []
    coming: set[tuple[int, str]] = set()
    for rank, names in enumerate(needs):
        for name in sorted(names):
            if nodes[rank] not in places[name] and (nodes[rank], name) not in coming:
                coming.add((nodes[rank], name))
                holders = [peer for peer, node in enumerate(nodes) if node in places[name]]
                plan.append((name, holders[len(plan) % len(holders)], rank))
    return plan


PART_KEYS = {"step", "rank", "writers", "problem", "facts", "tensors", "files"}
"""Keys of a part of a kept generation, see `kept_parts`."""


def write_part(folder: Path, part: Mapping[str, Any]) -> None:
    """Write a rank's part of a kept generation, see `kept_parts`, into `folder`. Raises UserError."""
    with writing(folder):
        content = json.dumps({**part, "checksum": checksum(part)})
        write_atomically(folder / f"part-{part['rank']:05d}.json", content.encode())


def kept_parts(root: Path) -> list[dict[str, Any]]:
    """Return the parts of kept generations on this node, without damaged ones.

    A part has `step` and `rank`; `writers`, the ranks whose parts form a complete generation; `problem`, why this one
    has no tensors, or ""; `facts` of the run; and `tensors` and `files` of `Written`, which lie in `folder`.
    """
    parts = []
    for file in sorted(root.glob(".kept-*/part-*.json")):
        with suppress(UserError):
            part = read_json_object(file)
            if part.pop("checksum", None) == checksum(part) and part.keys() == PART_KEYS:
                parts.append({**part, "folder": file.parent.name})
    return parts


def newest_kept(parts: Iterable[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Return the parts of the newest complete generation in rank order, or [] and what the others lack."""
    # ranks that disagree about who survives do not write the same generation
    generations = defaultdict[tuple[int, str, tuple[int, ...]], dict[int, Mapping[str, Any]]](dict)
    for part in parts:
        generations[part["step"], part["folder"], tuple(part["writers"])][part["rank"]] = part
    problems = []
    for (step, _, writers), found in sorted(generations.items(), reverse=True):
        missing = [str(rank) for rank in writers if rank not in found]
        reasons = [part["problem"] for part in found.values() if part["problem"]]
        reasons += [f"rank {', '.join(missing)} has not written its part"] if missing else []
        if not reasons:
            return [found[rank] for rank in sorted(found)], ""
        problems.append(f"the state of step {step} is incomplete: {reasons[0]}")
    return [], "; ".join(problems)


def commit_kept(path: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Commit a generation of `newest_kept` where this node has files of it. Raises UserError."""
    kept, partial = path.parent / parts[0]["folder"], partial_of(path)
    if not kept.is_dir():
        return
    with writing(path):
        shutil.rmtree(partial, ignore_errors=True)
        for file in kept.glob("part-*.json"):
            file.unlink()
        kept.rename(partial)
    commit(path, [Written(part["tensors"], part["files"]) for part in parts], _facts_of(parts))


def _facts_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of the run; each part has the trust ratios of its own tensors."""
    facts, unread = parts[0]["facts"], parts[0]["facts"].get("unread")
    if unread is None or "trust_ratios" not in unread["details"]:
        return dict(facts)
    ratios = ChainMap(*(part["facts"]["unread"]["details"]["trust_ratios"] for part in parts))
    return {**facts, "unread": {**unread, "details": {**unread["details"], "trust_ratios": dict(ratios)}}}
