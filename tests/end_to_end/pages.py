"""The commands that the README and the pages of docs show, and the cheap form in which the suite carries each out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser as hydra_parser

from pangu.cli import file_of, launched
from pangu.common.commands import PROGRAMS as FILES
from scripts.launch import LauncherParser
from tests.configs import config
from tests.end_to_end.commands import SMALL
from tests.spawn import free_port, repository

PAGES = [
    repository() / "README.md",
    *sorted(path for path in (repository() / "docs").glob("*.md") if not path.name.endswith(".zh.md")),
]
"""In English."""
PROGRAMS = ("python", "torchrun", "pip", "pangu")
NOT_RUN = {
    "PROCESSES=2 sbatch": "tests/clusters/test_sbatch.py runs the script, and test_slurm.py where there is Slurm",
    "bash scripts/modelarts.sh": "tests/clusters/test_kubernetes.py runs the script",
    "complete -o": "tests/end_to_end/test_cli.py completes words",
    "docker build --target": "no test has a daemon; hadolint reads the file",
    "docker build -t": "no test has a daemon; hadolint reads the file",
    "git clone": "asks a server",
    "hf download": "asks a server",
    "kill -STOP": "tests/end_to_end/test_faults.py stops processes",
    "kubectl apply": "no test has a cluster; tests/clusters/test_kubernetes.py checks the files",
    "OVERRIDES=scripts/slurm": "tests/clusters/test_sbatch.py runs the script with such a file",
    "pip install -e .": "tests/end_to_end/test_wheel.py installs what the project builds",
    "pip install dist/": "tests/end_to_end/test_wheel.py installs what the project builds",
    "pip wheel": "tests/end_to_end/test_wheel.py builds it",
    "pytest": "this is it",
    "python -m benchmarks.characters": "measures for an hour",
    "python -m benchmarks.counts": "counts models of 200 billion parameters for minutes",
    "python -m benchmarks.experts_quality": "measures for hours",
    "python -m benchmarks.planner_on_gloo": "measures for minutes",
    "python -m pangu.tasks.lm_eval": "tests/tasks/test_lm_eval.py does, where lm-eval is installed",
    "python tools/calibrate.py --from": "tests/report/test_correction.py does",
    "python tools/preprocess_data.py --input hf:": "asks a server; tests/end_to_end/test_streaming.py has a stand-in",
    "python tools/report.py runs/quickstart --serve": "does not end; tests/report/test_report.py asks the server",
    "sbatch --nodes=4": "no test has 4 nodes; tests/clusters/test_sbatch.py runs the script",
    "sky jobs launch": "no test has a cloud; tests/clusters/test_kubernetes.py runs the command of the task",
    "source /usr/local/Ascend": "of Ascend's own software",
    "srun --ntasks-per-node": "needs Slurm with GPUs; tests/clusters/test_slurm.py has srun start processes",
    "torchrun $DISTRIBUTED_ARGS pretrain_gpt.py": "Megatron's; tests/end_to_end/test_guides.py translates it",
    "torchrun --nproc-per-node=2 examples/": "tests/as_library/test_public.py does",
    "torchrun --nproc-per-node=2 tools/calibrate.py": "tests/tools/test_calibrate.py does, with --quick",
}
"""Beginnings of the lines that `test_the_commands_of_a_page_work` does not carry out, and why. It does all others."""
_SHELL = re.compile(
    r"(?:[A-Z_]+=\S* +|\w+=\$\()*(apt-get|apt|bash|cat|cd|complete|cp|curl|deepspeed|docker|export|find|git|grep|helm|"
    r"hf|jupyter|kill|kubectl|llama-server|ls|make|mkdir|mkdocs|mlflow|mpirun|nohup|nvidia-smi|printf|python|ray|rm|"
    r"sbatch|scancel|scontrol|sed|sh|singularity|sky|source|squeue|srun|ssh|sudo|tail|tensorboard|uv|vllm|wandb|wget|"
    r"xargs)(?: |$)"
)
"""The beginning of a line that is a command of the shell or of another program."""
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


def shell_lines(page: Path) -> list[str]:
    """The lines for the shell, comments left out: those that start no program of `PROGRAMS`."""
    lines = (re.sub(" +", " ", line.partition("   #")[0]) for line in shown(page))
    return [line for line in lines if _SHELL.match(line) and line.split(" ")[0] not in PROGRAMS]


def is_run(line: str) -> bool:
    """Whether the suite carries out a line."""
    return not line.startswith(tuple(NOT_RUN))


def _apart(words: list[str]) -> Iterator[list[str]]:
    while "&&" in words:
        place = words.index("&&")
        yield words[:place]
        words = words[place + 1 :]
    yield words


def run_python_block(page: Path, number: int = 1) -> None:
    """Run a block of Python of the page in the present folder."""
    block = page.read_text(encoding="utf-8").split("```python\n")[number]
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
            options = LauncherParser().parse_args(words[1 if words[0] == "torchrun" else 2 :])
            processes = int(options.nproc_per_node) * int(options.nnodes.split(":")[0])
            script, arguments = options.training_script, options.training_script_args
            if options.module and script == "pangu":
                return cls(FILES[arguments[0]][0], arguments[1:], processes)
            return cls(_of_module(script) if options.module else script.removesuffix(".py"), arguments, processes)
        if words[0] == "python" and words[1].endswith(".py"):
            return cls(words[1].removesuffix(".py").removeprefix(f"{repository()}/").removeprefix("pangu/"), words[2:])
        if words[:2] == ["python", "-m"] and words[2].startswith(("pangu.pretrain", "pangu.tools.", "pangu.scripts.")):
            return cls(_of_module(words[2]), words[3:])
        if words[:3] == ["python", "-m", "benchmarks.planner_accuracy"]:
            return cls("benchmarks/planner_accuracy/__main__", words[3:])
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
    few |= {"parallel.layers": "null"} if parallel.layers else {}
    return tuple(f"{key}={value}" for key, value in few.items())


SEARCHED = ("parallel.tensor=8", "parallel.zero=1", "batch.micro_size=1", "memory.recompute=full")
"""What leaves few layouts to a search."""
MODEL_OF_FILES = {
    "pangu_2.6B/": "pangu.ckpt",
    "model=pangu_2_6b": "model.heads=8",
    "runs/qwen3_tuned": "runs/qwen3",
    "runs/tiny_chat": "runs/tiny",
    "runs/Qwen3-0.6B-chat": "runs/Qwen3-0.6B",
    "data.tokenizer={kind: pangu, path: vocab.model}": "data.tokenizer={kind: pangu, path: my/tokenizer.model}",
}
OTHER_RUNS = {
    "2": "1",
    "runs/tiny_chat": "runs/tiny",
    "runs/Qwen3-0.6B-chat": "runs/tiny",
    "runs/own": "runs/quickstart",
    "runs/gpt2_fineweb": "runs/quickstart",
}
STEP = "runs/quickstart/checkpoints/step-00000020"
"""The trained one."""
TRAINED_STEP = {
    f"{prefix}runs/{name}": f"{prefix}{STEP}"
    for prefix in ("", "checkpoint.init_from=")
    for name in (
        *("quickstart/checkpoints/step-00001850", "quickstart/checkpoints/step-00000300"),
        *("one/checkpoints/step-00000005", "two/checkpoints/step-00000005"),
    )
}
FOUND_HERE = TRAINED_STEP | {
    "data.train=[/tmp/text.txt]": "data.train=[text.txt]",
    "metrics.prometheus_port=9400": f"metrics.prometheus_port={free_port()}",
    "train.alert_command=[/opt/bin/tell,--channel,training]": "train.alert_command=[/bin/true,--channel,training]",
}
"""Words of runs of the quickstart."""
TWO_STEPS = (
    *(word for word in SMALL if not word.startswith("batch")),
    *("train.steps=2", "lr_schedule.warmup_steps=1", "validation.every=0", "sample.tokens=0"),
    "train.output=runs/two_steps",
)
LAUNCHES = {
    "launch.sh": "llama2_7b.sh",
    "train_7b.sh": "llama2_7b.sh",
    "train_gpt3_175b_distributed.sh": "gpt3_175b.sh",
    "ds_config.json": "deepspeed.json",
    "run_pangualpha_13b.yaml": "pangu_13b.yaml",
    "config.json": "llama2_7b.json",
}
"""Names on the pages, and in the folder of published launches."""
FORMS: dict[str, Form] = {
    "tools/train_tokenizer": Form("a small corpus", ("--overwrite",), {"40000": "300", "4000": "500"}),
    "tools/preprocess_data": Form(
        "a small corpus",
        ("--max-bad", "0", "--overwrite"),
        {"tokenizer.model": "my/tokenizer.model", "held-out.jsonl": "texts.jsonl", "0.05": "0.5"},
    ),
    "tools/inspect_data": Form(
        "nobody has trained on conversations, and the vocabulary of one's own has another name",
        instead={"runs/chat/data/instructions": "my/corpus", "tokenizer.model": "my/tokenizer.model"},
    ),
    "tools/inspect_checkpoint": Form("the trained model has fewer steps", instead=TRAINED_STEP),
    "tools/convert_checkpoint": Form("files of small models", instead=MODEL_OF_FILES),
    "tools/translate_config": Form(
        "published launches",
        instead={
            name: str(repository() / "tests/interop/launches" / LAUNCHES.get(name, name))
            for name in (*LAUNCHES, "llama3_8b.toml")
        },
    ),
    "tools/report": Form("other runs", instead={"runs/lamb": "runs/pangu_2_6b", "runs/sweep": "runs"}),
    "benchmarks/planner_accuracy/__main__": Form(
        "few measurements",
        instead={
            "measurements.csv": str(repository() / "tests/planner_accuracy/measurements.csv"),
            **{
                name: str(repository() / name)
                for name in ("tests/planner_accuracy/unseen.csv", "tests/planner_accuracy/moe.csv")
            },
            "pangu/report/intervals.json": "intervals.json",
            "benchmarks/results/planner_fit.json": "planner_fit.json",
        },
    ),
    "scripts/generate": Form("one process", ("--max-tokens", "4"), OTHER_RUNS),
    "scripts/evaluate": Form(
        "one process, one question, files without examples", ("--limit", "1"), {"2": "1", "few": "0"}
    ),
}
"""By program; the words of `pretrain` and `tools/plan` depend on what they ask for."""


def two_steps(command: Command) -> Form | None:
    """The form in which a run of the quickstart trains; None: of others, and of those that save on a server."""
    if "+config=quickstart" not in command.arguments or any("s3://" in word for word in command.arguments):
        return None
    other_data = any(word.startswith("data=") for word in command.arguments)
    data = () if other_data else ("data.folder=runs/quickstart/data",)
    return Form("two steps of a small model", (*TWO_STEPS, *data), FOUND_HERE)


def cheap(command: Command) -> Form:
    """The form of a command."""
    if command.program == "pretrain" and not command.trains:
        return Form("composes or explains, as it is")
    if command.program == "pretrain":
        dry = Form(
            "a step of few layers without devices", (*_few(command.overrides, command.processes), "dry_run=true")
        )
        return (command.processes == 1 and two_steps(command)) or dry
    if command.program == "tools/plan":
        overrides = [word for word in command.arguments if "=" in word]
        if "--search" in command.arguments:
            given = {word.partition("=")[0] for word in overrides}
            more = tuple(word for word in SEARCHED if word.partition("=")[0] not in given)
            return Form("few layouts, whose layers nobody counts", more)
        return Form("few layers", _few(overrides, 1))
    return FORMS[command.program]
