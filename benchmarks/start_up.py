"""Start-up of a process, in counts: what it has imported, how much of pangu that is, and its resident memory.

    python -m benchmarks.start_up --before OTHER_CHECKOUT --output benchmarks/results/start_up.json

Each process is fresh, and imports torch alone, the package, the trainer, or prints help, or carries out a plain run of
two steps on one CPU. Counts do not depend on the machine's speed; resident bytes are the median over repeats, in which
the checkouts alternate. `--before` measures another checkout beside this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import machine

PROCESSES = {
    "import torch": "import torch",
    "import pangu": "import pangu",
    "pretrain.py --help": "import sys; sys.argv[1:] = ['--help']; from pangu.pretrain import main; main()",
    "import pangu.training.step": "import pangu.training.step",
    "plain run": """
import sys
from pathlib import Path
from pangu.pretrain import pretrain
sys.argv[1:] = WORDS
pretrain(Path("configs").resolve())
""",
}
"""Code of each process; `WORDS` are the words of a run's command line."""
WORDS = [
    *("+config=quickstart", "data=synthetic", "model.layers=2", "model.hidden=64", "model.heads=4"),
    *("model.sequence=64", "model.vocab=64", "batch.global_size=4", "batch.micro_size=2", "validation.every=0"),
    *("train.steps=2", "train.device=cpu", "checkpoint.every=0", "sample.tokens=0", "metrics.tensorboard=false"),
]
COUNT = """
import json, sys
from pathlib import Path

installed = [name for name, module in sys.modules.items() if "-packages" in (getattr(module, "__file__", None) or "")]
own = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "pangu"]
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print()
print(json.dumps({
    "packages": len({name.partition(".")[0] for name in installed}),
    "modules": len(installed),
    "pangu_modules": len(own),
    "pangu_lines": sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in own if file),
    "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
    "compiler": sorted({"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys()),
}))
"""
"""Last figures of a process: third-party top-level packages and modules, modules and lines of pangu, and memory."""


def count(checkout: Path, code: str) -> dict[str, Any]:
    """Return the counts of a fresh process that runs `code` in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        code = code.replace("WORDS", repr([*WORDS, f"train.output={folder}/run"]))
        command = [sys.executable, "-c", code + "\n" + COUNT]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


def measure(checkouts: dict[str, Path], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each process and checkout."""
    rows = []
    for process, code in PROCESSES.items():
        names = ["this"] if process == "import torch" else list(checkouts)
        counts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                counts[name].append(count(checkouts[name], code))
        for name, found in counts.items():
            resident = statistics.median(one["resident_bytes"] for one in found)
            checkout = "" if process == "import torch" else name
            rows.append({"process": process, "checkout": checkout, **found[0], "resident_bytes": resident})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, print rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout, measured beside this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    checkouts = {"this": Path(__file__).resolve().parent.parent}
    if options.before is not None:
        checkouts = {"before": options.before.resolve(), **checkouts}
    rows = measure(checkouts, options.repeats)
    if options.output is not None:
        command = " ".join(["python -m benchmarks.start_up", *sys.argv[1:]])
        result = {"command": command, "words": WORDS, "repeats": options.repeats, "machine": machine(), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
