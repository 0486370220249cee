"""Shows what a checkpoint holds, how large it is, which layout wrote it, and whether it is proven or condemned.
--verify reads every byte of it, and --diff compares it with another one, tensor by tensor, whatever their layouts:
tensors are always full here."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.checkpoint.index import find_damage, read_index, require_facts
from pangu.checkpoint.reading import newest_checkpoint, read_tensor
from pangu.checkpoint.status import CheckpointStatus, read_status
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, printable, shown
from pangu.common.exit_status import exit_status
from pangu.metrics.text import quantity, size

SHOWN = ("step", "samples", "skipped", "layout", "identity")
"""Facts of a run that are printed."""
_EXAMPLE = """example:
  python tools/inspect_checkpoint.py runs/quickstart/checkpoints/step-00001850 --verify
  python tools/inspect_checkpoint.py runs/a/checkpoints/step-00000100 --diff runs/b/checkpoints/step-00000100 --json
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step-00000100, or RUN: its newest one")
    parser.add_argument("--verify", action="store_true", help="check all files against their checksums")
    parser.add_argument("--diff", type=Path, metavar="CHECKPOINT", help="checkpoint to compare the tensors with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def summary(path: Path, index: dict[str, Any]) -> dict[str, Any]:
    """Return facts of the run, sizes, status, and the shape of every tensor."""
    kinds: dict[str, dict[str, int]] = {}
    for name, entry in index["tensors"].items():
        kind = kinds.setdefault(name.split("/")[0], {"tensors": 0, "elements": 0})
        kind["tensors"] += 1
        kind["elements"] += math.prod(entry["shape"])
    facts = {key: value for key, value in index.items() if key not in ("tensors", "files", "fp8")}
    tensors = {
        name: {"shape": entry["shape"], "dtype": entry["dtype"], "pieces": len(entry["pieces"])}
        for name, entry in index["tensors"].items()
    }
    files = [file["bytes"] for file in index["files"].values()]
    facts |= {"files": len(files), "bytes": sum(files), "standing": asdict(read_status(path))}
    return {"path": str(path), **facts, "kinds": kinds, "tensors": tensors}


def differences(path: Path, ours: dict[str, Any], other: Path) -> dict[str, Any]:
    """Largest absolute difference of every tensor, and what only one of the checkpoints has.

    Raises:
        UserError: if `other` is damaged: a difference would mean nothing.
    """
    theirs = _intact(other)
    largest: dict[str, Any] = {}
    for name in (name for name in ours["tensors"] if name in theirs["tensors"]):
        shapes = [index["tensors"][name]["shape"] for index in (ours, theirs)]
        if shapes[0] != shapes[1]:
            largest[name] = f"{shapes[0]} here, {shapes[1]} there"
            continue
        difference = read_tensor(path, ours, name).double() - read_tensor(other, theirs, name).double()
        largest[name] = float(torch.linalg.vector_norm(difference, math.inf))
    return {
        "other": str(other),
        "largest": largest,
        "only_here": sorted(ours["tensors"].keys() - theirs["tensors"].keys()),
        "only_there": sorted(theirs["tensors"].keys() - ours["tensors"].keys()),
    }


def _intact(path: Path) -> dict[str, Any]:
    """The index of a checkpoint. Raises a UserError that names all its damaged files."""
    index = read_index(path)
    if damage := find_damage(path, index):
        raise UserError("\n".join(damage))
    return index


def show(console: Console, facts: dict[str, Any]) -> None:
    """Print facts of a checkpoint: a `summary`, and what `inspect` adds."""

    def say(text: str) -> None:
        console.print(printable(text))

    layout, model = (
        ", ".join(f"{key} {shown(value)}" for key, value in facts[name].items()) for name in ("layout", "identity")
    )
    counts = f"{quantity(facts['samples'], 'sample')}, {quantity(facts['skipped'], 'step')} skipped"
    say(f"{facts['path']}: step {facts['step']}, {counts}")
    say(f"written by   {layout}")
    say(f"of           {model}")
    say(f"files        {facts['files']}, {size(facts['bytes'])}{', intact' if facts['verified'] else ''}")
    say(f"status       {CheckpointStatus(**facts['standing'])}")
    for event in facts.get("watch", {}).get("rollbacks", ()):
        first, end = event["left_out"]
        left_out = f"to {event['back_to']}, skipping samples {first} to {end - 1}"
        say(f"went back    from step {event['step']} {left_out}: {event['fault']}")
    for kind, one in facts["kinds"].items():
        say(f"{kind:<12} {quantity(one['tensors'], 'tensor')}, {quantity(one['elements'], 'element')}")
    difference = facts["difference"]
    table = Table(box=None, header_style="italic", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("tensor", "shape", "format", "pieces", *(["largest difference"] if difference else [])):
        table.add_column(column)
    for name, entry in facts["tensors"].items():
        cells = [name, str(entry["shape"]), entry["dtype"], str(entry["pieces"])]
        table.add_row(*map(Text, cells + ([str(difference["largest"].get(name, "only here"))] if difference else [])))
    console.print(table)
    for name in difference["only_there"] if difference else ():
        say(f"only in {difference['other']}: {name}")


def inspect(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError for a damaged checkpoint."""
    options.checkpoint = newest_checkpoint(options.checkpoint)
    options.diff = options.diff and newest_checkpoint(options.diff)
    index = _intact(options.checkpoint) if options.verify or options.diff else read_index(options.checkpoint)
    require_facts(options.checkpoint, index, *SHOWN)
    facts = summary(options.checkpoint, index)
    facts["verified"] = options.verify or options.diff is not None
    facts["difference"] = differences(options.checkpoint, index, options.diff) if options.diff else None
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        show(Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, soft_wrap=True), facts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: inspect(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
