"""Copies of a run's state in the memory of nodes (`checkpoint.memory_every`), from which it continues after a crash.

Each rank writes its files into a folder in its node's memory, and its buddy on the next node keeps a copy of them
(Wang et al. 2023, Gemini). A thread does that during the next steps, with a process group of its own:

    step 10 | copy to the host | steps 11, 12, ...                                                   | step 20
    thread                     | take the memory of step -20 | write | meet | send to the buddy | meet | commit | meet
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pangu.checkpoint.files import (
    Slice,
    Written,
    amend,
    checkpoint_path,
    commit,
    list_checkpoints,
    partial_of,
    start,
    step_of,
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
)
from pangu.checkpoint.reading import pieces_by_file
from pangu.checkpoint.run_folder import flush_figures
from pangu.checkpoint.staging import StagingMemory
from pangu.checkpoint.writing import discarding, write_own
from pangu.collectives.agreement import (
    StuckError,
    agree,
    agree_on_first,
    agree_on_long_work,
    first_message,
    in_thread,
    outcome,
)
from pangu.collectives.point_to_point import exchange_bytes
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import SAVE_SECONDS, LocalError, UserError, reading, writing
from pangu.common.files import open_regular, remove, write_atomically
from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.topology.backends import abort_groups
from pangu.topology.launch import Launch
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup
from pangu.training.step import Trainer

log = logging.getLogger("pangu")

T = TypeVar("T")

PLACE = "PANGU_MEMORY"
"""Environment variable: folder for copies in a node's memory."""
ID = "memory.id"
"""File in the run folder with the name of the run's folders in memory, so that those of a deleted run are not used."""
GENERATIONS = 2
"""Generations that stay while a new one takes the memory of the one before."""
WRITER = "copies in memory"
"""Name of the thread."""


class MemoryCheckpoints(AbstractContextManager["MemoryCheckpoints"]):
    """Writer and finder of generations in the memory of nodes; a context manager, as a run that ends leaves none."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        """Make the process group, and the folder on each node."""
        # no groups: what the thread refers to cannot be closed while it waits for another rank, which may wait for that
        self._mesh, self._background = replace(mesh, groups={}), mesh.background("copies")
        self._output, self._is_asked = Path(config.train.output), config.checkpoint.memory_every > 0
        self._group: AxisGroup | None = None
        if mesh.layout.world > 1:
            self._group = AxisGroup(mesh.new_group(range(mesh.layout.world), "host"), "host")
        place = (socket.gethostname(), os.path.realpath(os.environ.get(PLACE, "/dev/shm")))
        places = gather_objects(place, self._group)
        self._nodes = [places.index(one) for one in places]
        """First rank on the node of each rank."""
        self._buddies = buddies(self._nodes)
        self._peers = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[mesh.rank]]
        self._leads = self._peers[0] == mesh.rank
        """True if this rank acts for its node."""
        name = agree_on_first(mesh, self._read_id)
        self._root = Path(place[1]) / f"pangu-{os.getuid()}-{name[:16]}"
        self.folder = self._root / name[16:]
        agree(mesh, self._make_folder, runs_here=self._leads)
        if len(set(self._nodes)) == 1 and self._is_asked:
            log.warning("checkpoint.memory_every: copies on one node outlive its processes, but not the node")
        self._staging: StagingMemory | None = None
        self._writing: Future[None] | None = None
        self._own: set[Path] = set()
        """Generations that this object has written."""
        self._places: dict[str, set[int]] = {}
        """Nodes that hold each file of the generation that was found."""
        self.failed = 0
        """Generations in a row that could not be written."""
        self.sizes: dict[str, float] = {}
        """Sizes of the last generation, see `StepRecord`."""

    def find(self, has_newer: Callable[[int], bool]) -> Path | None:
        """Return the newest complete generation, unless the disk has an intact checkpoint after its step.

        Otherwise, return None and delete all generations. All ranks get the same; none has fetched any file yet.
        """
        held = self._held(lambda: list_checkpoints(self.folder))
        found = newest_complete(held)
        if kept := self._commit_kept(-1 if found is None else found[0]):
            held += self._held(lambda: [kept] if kept.exists() else [])
            found = newest_complete(held)
        if found is None or has_newer(found[0]):
            if held:
                steps = ", ".join(str(step) for step in sorted({one.step for one in held}))
                reason = "a checkpoint is newer" if found else "the nodes that are left hold no complete one"
                log.warning("the copies in memory of step %s are not used: %s", steps, reason)
            self.clear()
            return None
        step, checksum, self._places = found
        path = checkpoint_path(self.folder, step)
        holders = [one.node for one in held if (one.step, one.index) == (step, checksum)]
        (index,) = (one for one in self._meet(lambda: read_index(path), holders[0] == self._mesh.rank) if one)

        def prepare() -> None:
            with writing(path):
                for rest in (*list_checkpoints(self.folder), *self.folder.glob(".*")):
                    is_stale = rest == path and self._mesh.rank not in holders
                    if rest.name.startswith(".") or is_stale or step_of(rest) > step:
                        remove(rest)
                path.mkdir(exist_ok=True)
            amend(path, index)

        self._meet(prepare, self._leads)
        return path

    def _held(self, paths: Callable[[], Iterable[Path]]) -> list[LocalGeneration]:
        """Return the generations on all nodes; `paths` returns those on this one. Damage is a warning."""
        share = self._peers.index(self._mesh.rank), len(self._peers)
        answers = self._meet(lambda: local_generations(paths(), self._nodes[self._mesh.rank], *share))
        for line in dict.fromkeys(line for _, lines in answers for line in lines):
            log.warning("skipping a copy in memory: %s", line, extra={"alert": "damaged_checkpoint"})
        return [one for found, _ in answers for one in found]

    def _commit_kept(self, newest: int) -> Path | None:
        """Commit the generation that surviving ranks have kept, if it is complete and newer than step `newest`."""
        answers = self._meet(lambda: kept_parts(self.folder), self._leads)
        parts, problem = newest_kept(part for found in answers for part in found or ())
        if not any(answers) and Launch.from_environment().epoch:
            problem = "no surviving rank has kept its state"
        path = checkpoint_path(self.folder, parts[0]["step"] if parts else 0)
        if parts and parts[0]["step"] > newest:
            try:
                self._meet(lambda: commit_kept(path, parts), self._leads)
                log.info("%-12s the surviving ranks hold the complete state of step %d", "survivors", parts[0]["step"])
                return path
            except UserError as error:
                problem = str(error)
        if problem:
            log.warning("survivors: %s", problem)
        return None

    def fetch(self, path: Path, trainer: Trainer) -> None:
        """Fetch the files that this node's ranks need and it lacks, if `path` is the generation that was found."""
        if path.parent != self.folder:
            return
        index = read_index(path)
        files = index["files"]
        needs = gather_objects(set(pieces_by_file(index, trainer.state(every_kind=True))), self._group)
        plan = transfers(self._places, self._nodes, needs)
        self._move(path, [(name, files[name]["bytes"], *ranks) for name, *ranks in plan])
        if plan:
            moved = sum(files[name]["bytes"] for name, *_ in plan)
            log.info("%-12s %d files (%s) fetched from other nodes", "memory", len(plan), size(moved))

    def save(self, trainer: Trainer, facts: Mapping[str, Any]) -> None:
        """Copy the state of the run, and start to write it into memory. The generation before has been written."""
        if self._staging is None:
            state = trainer.state(every_kind=True, owned=True)
            self._staging = StagingMemory(self._mesh.device, state, keeps=True)
        trainer.copied.wait()  # the update waits for the copy of a checkpoint of this step, too
        slices, trainer.copied = self._staging.copy(trainer.state(owned=True))
        write = partial(self._write, checkpoint_path(self.folder, trainer.step), slices, facts)
        self._writing = in_thread(WRITER, write)

    def wait(self) -> None:
        """Wait until the last generation is written; a failure is a warning.

        Raises:
            StuckError: The writing makes no progress.
            RuntimeError: A rank is gone.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
            self.failed = 0
        except StuckError:
            raise
        except UserError as error:
            self.failed += 1
            log.warning("no copy in memory: %s", error, extra={"alert": "failed_save"})

    def clear(self) -> None:
        """Delete all generations on all nodes, because the run continues from elsewhere; none is being written."""
        agree(self._mesh, lambda: self._delete(self.folder.iterdir()), runs_here=self._leads)

    def release(self) -> None:
        """Delete what was kept for all ranks of this epoch, which have read it, unless copies are asked for."""
        if not self._is_asked:
            self.clear()

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Wait for the last generation, or end it if this process fails; free the memory if the run has ended."""
        if self._writing is not None:
            if isinstance(error, LocalError):
                abort_groups()  # Python ends with an abort if the thread waits for other ranks then
            wait([self._writing], SAVE_SECONDS)
        if error is None and self._leads:
            shutil.rmtree(self._root, ignore_errors=True)

    def _read_id(self) -> str:
        """Return 16 digits that stand for the run folder, and a random name, which the run folder keeps."""
        file = self._output / ID
        with reading(file):
            if not file.exists():
                write_atomically(file, secrets.token_hex(8).encode())
            with open_regular(file, "rb") as opened:
                name = opened.read(16).decode("ascii", "replace")
        if len(name) != 16 or not name.isalnum():
            raise UserError(f"{file}: damaged; delete it to start without the copies in memory")
        return hashlib.sha256(os.fsencode(self._output.resolve())).hexdigest()[:16] + name

    def _make_folder(self) -> None:
        """Make the folder of this node, and delete those of runs before that had the same run folder."""
        fix = f"set {PLACE} to a folder in memory on every node" + ", or checkpoint.memory_every=0" * self._is_asked
        with reading(self._root, rule="copies in memory cannot be kept here", fix=fix):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._root.is_symlink() or self._root.stat().st_uid != os.getuid():
                raise UserError(f"{self._root}: belongs to another user; {fix}")
            self.folder.mkdir(exist_ok=True)
            self._delete(path for path in self._root.iterdir() if path != self.folder)

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with writing(path):
                remove(path)

    def _meet(self, action: Callable[[], T], runs_here: bool = True) -> list[Any]:
        """Run `action` like `agree`, but in this object's group: results may be large, and many."""
        outcomes = gather_objects(outcome(action) if runs_here else (None, None), self._group)
        if (message := first_message(outcomes)) is not None:
            raise UserError(message)
        return [result for result, _ in outcomes]

    def _write(self, path: Path, slices: Iterable[tuple[str, Slice]], facts: Mapping[str, Any]) -> None:
        """Write a generation together with the other ranks."""
        rank, partial_path = self._mesh.rank, partial_of(path)
        with discarding(path, self._leads):
            (facts, *_) = self._meet(lambda: self._start(path, facts if rank == 0 else {}))
            written = list[Written]()

            def write(on_progress: Callable[[], None]) -> None:
                written.append(write_own(path, rank, slices, on_progress))
                if rank == 0:
                    flush_figures(self._output)

            agree_on_long_work(self._background, f"writing {path}", write, runs_here=True)
            parts: Sequence[Written] = gather_objects(written[0], self._group)
            moves = [
                (name, file["bytes"], source, buddy)
                for source, buddy in enumerate(self._buddies)
                for name, file in parts[source].files.items()
                if self._nodes[source] != self._nodes[buddy]
            ]
            self._move(partial_path, moves)
            try:
                self._meet(lambda: commit(path, parts, facts), self._leads)
            except UserError:
                # a node could not: were this one's counted, it would take the place of one that all nodes have
                if self._leads:
                    remove(path)
                raise
        self._own.add(path)
        sent, kept = (sum(length for _, length, *ranks in moves if ranks[end] == rank) for end in (0, 1))
        if moves and not self.sizes:
            log.info("%-12s rank 0 sends %s to its buddy, keeps %s of another rank", "memory", size(sent), size(kept))
        with writing(self.folder):
            used = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        self.sizes = {"copies_gib": used / 2**30, "copies_sent_gib": sent / 2**30}

    def _start(self, path: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a generation in the memory of one that is too old: its pages need not be cleared. Return `facts`."""
        if self._leads:
            start(path)
            # not before: until every node had the newest one, the two before might be all that was whole
            old = list_checkpoints(self.folder)[:-GENERATIONS]
            if old and old[-1] in self._own:  # another layout has other files
                self._own.remove(old[-1])
                with writing(path):
                    old.pop().rename(partial_of(path))
            self._delete(old)
        return facts

    def _move(self, folder: Path, moves: Sequence[tuple[str, int, int, int]]) -> None:
        """Move (file, bytes, sending rank, receiving rank) of a folder; a file gets its name when it is complete."""
        rank = self._mesh.rank
        arriving = [(name, length, sender) for name, length, sender, to in moves if to == rank]

        def allocate() -> None:
            for name, length, _ in arriving:
                with writing(folder), suppress(FileNotFoundError):
                    (folder / name).rename(folder / f"{name}.part")
                # memory that turned out to be missing only when it is written would be a SIGBUS
                with writing(folder), (folder / f"{name}.part").open("ab") as file:
                    file.truncate(length)
                    os.posix_fallocate(file.fileno(), 0, length)

        def publish() -> None:
            with writing(folder):
                for name, *_ in arriving:
                    (folder / f"{name}.part").rename(folder / name)

        self._meet(allocate)
        sent = [(_mapped(folder / name, length), to) for name, length, sender, to in moves if sender == rank]
        received = [(_mapped(folder / f"{name}.part", length), peer) for name, length, peer in arriving]
        if self._group is not None:
            exchange_bytes(sent, received, self._group)
        self._meet(publish)


def forget(output: Path) -> None:
    """Forget the generations in memory: the run continues without copies, so no later start may use them."""
    with writing(output / ID):
        (output / ID).unlink(missing_ok=True)


def _mapped(path: Path, length: int) -> Tensor:
    with path.open("r+b") as file:
        # all pages at once: a fault for each costs more than to copy it
        content = mmap.mmap(file.fileno(), length, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(content, dtype=torch.uint8)
