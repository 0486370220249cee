"""Figures of the package's size and their limits: `python -m tests.size` prints both, `--write` lowers the limits.

The limits may only go down. A commit that raises one says in its body what the raise buys, naming the figure.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from pangu.common.exit_status import exit_status
from tests.spawn import repository

LIMITS = repository() / "tests" / "size.json"
PACKAGE = repository() / "pangu"
COMMANDS = repository() / "tools", repository() / "scripts"
"""Folders beside pangu/ that are installed with it."""
PLANNING = ("dryrun", "planning")
PERIPHERY = (*PLANNING, "calibration", "interop", "prepare", "tasks", "report")
"""Folders under pangu/ that a training run does not need."""
STUDY = repository() / "benchmarks" / "planner_accuracy"
"""Accuracy of the planner on published measurements."""
COMMITS = 50
"""Commits that changed the limits, back from the newest one, whose bodies are checked."""


def lines(*places: str | Path) -> int:
    """Return the number of lines of Python in folders and files under pangu/, or in other folders."""
    roots = [PACKAGE / place for place in places]
    files = {file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])}
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def shared_class_names() -> int:
    """Return the number of class names with more than one meaning in the package."""
    homes: dict[str, set[Path]] = defaultdict(set)
    for file in chain.from_iterable(folder.rglob("*.py") for folder in (PACKAGE, *COMMANDS)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(file)
    return sum(len(files) > 1 for files in homes.values())


def figures() -> dict[str, int]:
    """Return the figures that have limits."""
    package, commands = lines("."), lines(*COMMANDS)
    return {
        "lines of the package": package + commands,
        "lines of the core": package - lines(*PERIPHERY),
        "lines of planning and dry run": lines(*PLANNING),
        "lines of the accuracy study": lines(STUDY),
        "class names with several meanings": shared_class_names(),
    }


def limits(commit: str = "") -> dict[str, int]:
    """Return the limits of the working tree, or of a commit; none if it had no such file."""
    if not commit:
        return json.loads(LIMITS.read_text(encoding="utf-8"))
    shown = _git("show", f"{commit}:tests/size.json")
    return json.loads(shown) if shown else {}


def unexplained() -> Iterator[str]:
    """Yield limits that a commit raised without naming them in its body, or in a later one that names the commit."""
    for commit in _git("log", f"-{COMMITS}", "--format=%H", "--", "tests/size.json").split():
        before, after, body = limits(f"{commit}^"), limits(commit), _git("show", "-s", "--format=%b", commit)
        for name, limit in after.items():
            if limit > before.get(name, limit) and name not in " ".join(body.lower().split()):
                later = _git("log", f"--grep={commit[:8]}", "--format=%b", f"{commit}..HEAD")
                if name in " ".join(later.lower().split()):
                    continue
                yield f"{commit[:7]} raises {name} from {before[name]:,} to {limit:,}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=repository(), capture_output=True, text=True, check=False)
    return done.stdout


def main() -> None:
    """Print each figure with its limit; with `--write` replace limits by lower figures."""
    found, limit = figures(), limits()
    for name, figure in found.items():
        print(f"{name:<36} {figure:>7,} of at most {limit.get(name, figure):>7,}")
    if "--write" in sys.argv[1:]:
        lower = {name: min(figure, limit.get(name, figure)) for name, figure in found.items()}
        LIMITS.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exit_status(main))
