"""The commands that the README and the pages of docs show, and the cheap form in which the suite carries each out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser as hydra_parser
from torch.distributed.run import get_args_parser

from pangu.cli import file_of, launched
from scripts.launch import split_spares
from tests.configs import config
from tests.spawn import repository

PAGES = [
    repository() / "README.md",
    *sorted(path for path in (repository() / "docs").glob("*.md") if not path.name.endswith(".zh.md")),
]
"""In English."""
PROGRAMS = ("python", "torchrun", "pip", "pangu")
OTHER_PROGRAMS = {
    "benchmarks": "measure for minutes to hours",
    "bash": "tests/clusters/test_kubernetes.py runs the script",
    "cat": "joins files for the command that follows",
    "complete": "tests/end_to_end/test_cli.py completes words",
    "docker": "no test has a daemon; .ci/run lints the file",
    "export": "sets a variable",
    "find": "test_the_heartbeats_that_are_shown_are_of_runs_that_hang runs it",
    "grep": "searches a file",
    "hf": "asks a server",
    "kill": "tests/end_to_end/test_faults.py stops processes",
    "kubectl": "no test has a cluster; tests/clusters/test_kubernetes.py checks the files",
    "mkdir": "test_the_rehearsal_of_gpt2_from_text_to_a_loss does the same",
    "pangu.tasks": "tests/tasks runs it where lm-eval is installed",
    "pip": "tests/end_to_end/test_wheel.py installs what the project builds",
    "pytest": "runs the tests",
    "sbatch": "tests/clusters/test_sbatch.py runs the script, and test_slurm.py where there is Slurm",
    "sky": "no test has a cloud; tests/clusters/test_kubernetes.py runs the command of the task",
    "source": "of Ascend's own software",
    "srun": "tests/clusters has no Slurm with GPUs",
}
"""Programs and packages that pages start besides this project's programs, and why they are not started as they are."""
_SHELL = re.compile(
    r"(?:[A-Z_]+=\S* +)*(apt-get|apt|bash|cat|cd|complete|cp|curl|deepspeed|docker|export|find|git|grep|helm|hf|"
    r"jupyter|kill|kubectl|llama-server|ls|make|mkdir|mkdocs|mlflow|mpirun|nohup|nvidia-smi|ray|rm|sbatch|scancel|"
    r"scontrol|sed|sh|singularity|sky|source|squeue|srun|ssh|sudo|tail|tensorboard|uv|vllm|wandb|wget|xargs)(?: |$)"
)
"""The beginning of a line that is a command, and its program."""
LAYERS, STAGES, MICRO_BATCHES = 2, 2, 2


def chinese(page: Path) -> Path:
    return page.with_name(f"{page.stem}.zh.md")


def shown(page: Path) -> Iterator[str]:
    """The lines of a page that stand in indented or fenced blocks, continued lines joined."""
    fenced = False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


def commands(page: Path) -> list[list[str]]:
    """The words of each command, comments left out. Commands that && joins are several."""
    lines = [line for line in shown(page) if line.split(" ")[0] in PROGRAMS]
    return [each for line in lines for each in _apart(shlex.split(line, comments=True))]


def other_programs(page: Path) -> list[tuple[str, str]]:
    """Each line that starts another program, and the program."""
    return [(line, found[1]) for line in shown(page) if (found := _SHELL.match(line))]


def _apart(words: list[str]) -> Iterator[list[str]]:
    while "&&" in words:
        place = words.index("&&")
        yield words[:place]
        words = words[place + 1 :]
    yield words


def run_python_block(page: Path) -> None:
    """Run the page's first block of Python in the present folder."""
    _, block = page.read_text(encoding="utf-8").split("```python\n", 1)
    exec(compile(block.split("```")[0], str(page), "exec"), {})


@dataclass(frozen=True)
class Command:
    """What a line starts: `program` (`pretrain`, `tools/plan`) with some arguments, on a number of processes."""

    program: str
    arguments: list[str]
    processes: int = 1

    @classmethod
    def of(cls, words: list[str]) -> Command | None:
        """None: it starts no file of this project. Exits if torchrun does not know the words."""
        if words[0] == "pangu":
            words = (
                ["torchrun", *launched(words[2:])]
                if words[1] == "launch"
                else ["python", str(file_of(words[1])), *words[2:]]
            )
        if words[0] == "torchrun" or words[:2] == ["python", "scripts/launch.py"]:
            _, words = split_spares(words[1 if words[0] == "torchrun" else 2 :])
            options = get_args_parser().parse_args(words)
            processes = int(options.nproc_per_node) * int(options.nnodes.split(":")[0])
            script = options.training_script
            program = _of_module(script) if options.module else script.removesuffix(".py")
            return cls(program, options.training_script_args, processes)
        if words[0] == "python" and words[1].endswith(".py"):
            return cls(words[1].removesuffix(".py").removeprefix(f"{repository()}/").removeprefix("pangu/"), words[2:])
        if words[:2] == ["python", "-m"] and words[2].startswith(("pangu.pretrain", "pangu.tools.", "pangu.scripts.")):
            return cls(_of_module(words[2]), words[3:])
        return None

    @property
    def overrides(self) -> list[str]:
        """Of a run, without Hydra's own options."""
        options, others = hydra_parser().parse_known_args(self.arguments)
        return [*options.overrides, *others]

    @property
    def trains(self) -> bool:
        return self.program == "pretrain" and not {"--help", "--cfg"} & set(self.arguments)


def _of_module(name: str) -> str:
    """The program that an installed package has under a name: `tools/plan` for `pangu.tools.plan`."""
    return name.removeprefix("pangu.").replace(".", "/")


@dataclass(frozen=True)
class Form:
    """How a command is carried out at little cost."""

    why: str
    more: tuple[str, ...] = ()
    """Words behind its own."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Words in the place of its own."""
    runs: bool = True
    """False: its words are only read, by the parser of the program."""

    def words(self, command: Command) -> list[str]:
        return [*(self.instead.get(word, word) for word in command.arguments), *self.more]


def _few(overrides: list[str], processes: int) -> tuple[str, ...]:
    """Overrides that leave few stages, layers and micro-batches of a run."""
    run = config(*overrides)
    parallel = run.parallel
    replicas = parallel.data or max(
        parallel.expert, processes // (parallel.tensor * parallel.pipeline * parallel.context)
    )
    stages = min(parallel.pipeline, STAGES)
    chunks = stages * parallel.virtual_stages
    few = {
        "model.layers": chunks if chunks > 1 else LAYERS,
        "parallel.pipeline": stages,
        "parallel.data": replicas,
        "batch.global_size": replicas * run.batch.micro_size * max(MICRO_BATCHES, stages),
    }
    return tuple(f"{key}={value}" for key, value in few.items())


SEARCHED = ("parallel.tensor=8", "parallel.zero=1", "batch.micro_size=1", "memory.recompute=full")
"""What leaves few layouts to a search."""
MODEL_OF_FILES = {
    "pangu_2.6B/": "pangu.ckpt",
    "model=pangu_2_6b": "model.heads=8",
    "runs/qwen3_tuned": "runs/qwen3",
    "runs/tiny_chat": "runs/tiny",
    "data.tokenizer={kind: pangu, path: vocab.model}": "data.tokenizer={kind: pangu, path: my/tokenizer.model}",
}
OTHER_RUNS = {
    "2": "1",
    "runs/tiny_chat": "runs/tiny",
    "runs/own": "runs/quickstart",
    "runs/gpt2_fineweb": "runs/quickstart",
}
TRAINED_STEP = {
    f"runs/{name}": "runs/quickstart/checkpoints/step-00000020"
    for name in (
        "quickstart/checkpoints/step-00001850",
        "one/checkpoints/step-00000005",
        "two/checkpoints/step-00000005",
    )
}
FORMS: dict[str, Form] = {
    "tools/train_tokenizer": Form("a small corpus", instead={"40000": "300"}),
    "tools/preprocess_data": Form("a small corpus", ("--max-bad", "0")),
    "tools/inspect_data": Form(
        "nobody has trained on conversations, and the vocabulary of one's own has another name",
        instead={"runs/chat/data/instructions": "my/corpus", "tokenizer.model": "my/tokenizer.model"},
    ),
    "tools/inspect_checkpoint": Form("the trained model has fewer steps", instead=TRAINED_STEP),
    "tools/convert_checkpoint": Form("files of small models", instead=MODEL_OF_FILES),
    "tools/calibrate": Form("tests/tools/test_calibrate.py measures, which takes seconds", runs=False),
    "tools/translate_config": Form("tests/interop/test_translate_config.py has such files", runs=False),
    "$DISTRIBUTED_ARGS": Form("of Megatron; tests/end_to_end/test_guides.py translates it", runs=False),
    "tools/report": Form("tests/report/test_report.py has such run folders", runs=False),
    "scripts/generate": Form("one process", ("--max-tokens", "4"), OTHER_RUNS),
    "scripts/evaluate": Form(
        "one process, one question, files without examples", ("--limit", "1"), {"2": "1", "few": "0"}
    ),
}
"""By program; the words of `pretrain` and `tools/plan` depend on what they ask for."""


def cheap(command: Command) -> Form:
    """The form of a command."""
    if command.program == "pretrain" and "--help" in command.arguments:
        return Form("explained where it is read", runs=False)
    if command.program == "pretrain" and not command.trains:
        return Form("composes, as it is")
    if command.program == "pretrain":
        few = _few(command.overrides, command.processes)
        return Form("a step of few layers without devices", (*few, "dry_run=true"))
    if command.program == "tools/plan":
        overrides = [word for word in command.arguments if "=" in word]
        if "--search" in command.arguments:
            given = {word.partition("=")[0] for word in overrides}
            more = tuple(word for word in SEARCHED if word.partition("=")[0] not in given)
            return Form("few layouts, whose layers nobody counts", more)
        return Form("few layers", _few(overrides, 1))
    if command.program.startswith("examples/"):
        return Form("tests/as_library carries it out", runs=False)
    return FORMS[command.program]
