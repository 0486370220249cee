"""Measures a trained model: perplexity on files, and the tasks of the PanGu-α paper, LAMBADA and WikiText.

A task reads the benchmark's own files from DATA/TASK, e.g. data/afqmc/dev.json. Figures are printed next to the paper's
for its 2.6B and 13B models; with --output they are written, and a second run continues where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.checkpoint.reading import newest_checkpoint
from pangu.collectives.agreement import agree
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, printable, writing
from pangu.common.exit_status import exit_status
from pangu.data.boundaries import describe_ids
from pangu.data.documents import read_documents
from pangu.data.finding import find_inputs
from pangu.evaluation.inference import LoadedModel
from pangu.interop.loading import load_model
from pangu.metrics.progress import ProgressBar
from pangu.tasks.arguments import add_model_arguments, connected, require_positive
from pangu.tasks.ask import Questions, ask, read_questions, summary
from pangu.tasks.catalogue import TASKS, find_task
from pangu.tasks.prompts import Setup, chosen
from pangu.tasks.results import AnswerFile, result, table
from pangu.tasks.task import Item, Task
from pangu.topology.launch import Launch, is_first_process

_EXAMPLE = """examples:
  python scripts/evaluate.py runs/quickstart --task perplexity --input corpus.txt
  torchrun --nproc-per-node=8 scripts/evaluate.py runs/pangu_2_6b --tensor 2 --task afqmc tnews c3 \\
      --data benchmarks --shots few --output results/pangu_2_6b.json
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--task", nargs="+", required=True, metavar="NAME", help=f"perplexity (of --input), {', '.join(TASKS)}"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with one folder of files for each task")
    parser.add_argument("--input", nargs="+", metavar="PATH", help="files, folders or globs of text for perplexity")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="record field that holds the text (text)")
    parser.add_argument(
        "--join", action="store_true", help="treat each --input file as one text, not as several documents"
    )
    parser.add_argument(
        "--shots", default="0", metavar="K", help="number of examples before each question; few: that of the paper (0)"
    )
    parser.add_argument(
        "--scoring",
        choices=["text", "rest"],
        default="text",
        help="rank answers by the perplexity of the full filled template (text, the default: the paper's words) or of "
        "what follows the answer (rest: the paper's code)",
    )
    parser.add_argument("--template", metavar="TEXT", help="prompt with {answer} and the task's fields (the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N questions per task, chosen at random (all)")
    parser.add_argument("--stride", type=int, help="tokens by which the window moves in long texts (half a window)")
    parser.add_argument(
        "--recipe",
        choices=["own", "huggingface"],
        default="own",
        help="perplexity: own (the default) counts each token once, after the id that starts a text; huggingface "
        "computes it as the documentation of transformers does, to compare with its published figures",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (0)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="results as JSON; answers are appended to FILE.answers.jsonl"
    )
    options = parser.parse_args(arguments)
    require_positive(parser, options, "limit", "stride")
    if options.shots != "few" and not options.shots.isdecimal():
        parser.error(f"--shots {options.shots}: must be a number, or few")
    if "perplexity" in options.task and not options.input:
        parser.error("--task perplexity needs --input")
    if set(options.task) != {"perplexity"} and not options.data:
        parser.error("--data must name the folder with the files of the tasks")
    if options.template and len(options.task) > 1:
        parser.error("--template needs a single --task")
    return options


def gather_questions(options: argparse.Namespace) -> list[Questions]:
    """Read the files of all tasks. Raises UserError before anything is computed."""
    tasks = []
    for name in options.task:
        if name == "perplexity":
            setup = Setup(seed=options.seed, limit=options.limit, stride=options.stride, recipe=options.recipe)
            task = Task(name, lambda _: iter(()), "{answer}", method="text")
            tasks.append(Questions(task, setup, chosen(_texts(options), task, setup), []))
            continue
        task = find_task(name)
        task = replace(task, template=options.template or task.template)
        shots = task.few if options.shots == "few" else int(options.shots)
        setup = Setup(shots, options.seed, options.scoring, options.limit, options.stride)
        tasks.append(read_questions(task, options.data / name, setup))
    return tasks


def _texts(options: argparse.Namespace) -> list[Item]:
    items = []
    for path in find_inputs(options.input):
        documents = list(read_documents([path], options.text_key))
        if not documents:
            raise UserError(f"--input {path}: has no text to compute the perplexity of")
        texts = ["\n\n".join(documents)] if options.join else documents
        items += [Item(f"{path}-{number}", {}, (text,)) for number, text in enumerate(texts)]
    return items


def run(options: argparse.Namespace, launch: Launch) -> None:
    """Carry out the command. Raises UserError."""
    questions = gather_questions(options)
    with connected(options.tensor, options.pipeline, options.device, launch, replicas=True) as mesh:
        # one process looks, as another checkpoint may be written meanwhile
        (path, *_) = agree(mesh, lambda: newest_checkpoint(options.model), runs_here=mesh.is_first)
        assert path is not None
        (file, *_) = agree(mesh, lambda: _answer_file(options, path), runs_here=mesh.is_first)
        model = load_model(path, mesh, options.precision, rows=options.rows)
        if mesh.is_first:
            print(printable(describe_ids(model.tokenizer, model.eod, model.bos)), file=sys.stderr)
        if (options.stride or 1) > model.config.sequence:
            window = model.config.sequence
            raise UserError(
                f"--stride {options.stride}: would skip tokens, as the window has model.sequence = {window}; "
                f"use 1 to {window}"
            )
        with ProgressBar(mesh.is_first) as progress:
            results = [_measure(model, one, file, progress) for one in questions]
    if launch.rank == 0:
        _print(options, path, results)


def _answer_file(options: argparse.Namespace, model: Path) -> AnswerFile | None:
    """Return the file that keeps answers, if there is one."""
    if options.output is None:
        return None
    names = "data input text_key join shots scoring template limit stride recipe seed precision"
    values = {name: getattr(options, name) for name in names.split()}
    setup = {**values, "model": str(model.resolve()), "data": options.data and str(options.data)}
    return AnswerFile(options.output.with_name(f"{options.output.name}.answers.jsonl"), setup)


def _measure(model: LoadedModel, questions: Questions, file: AnswerFile | None, progress: Progress) -> dict[str, Any]:
    """Ask what has no answer yet; the first process keeps the answers. All of them return the figures."""
    name, mesh = questions.task.name, model.mesh
    answers = dict(file.answers.get(name, {})) if file else {}
    bar = progress.add_task(name, total=len(questions.items))
    for chunk in ask(model, questions, list(answers)):
        answers |= {answer.id: answer for answer in chunk}
        if file:
            agree(mesh, partial(file.add, name, chunk), runs_here=mesh.is_first)
        progress.update(bar, completed=len(answers))
    item_answers = [answers[item.id] for item in questions.items]
    measures = summary(item_answers)
    if name == "perplexity" and "perplexity" not in measures:
        raise UserError(f"{name}: no token of --input can be predicted; use longer texts")
    return result(name, questions.setup.shots, len(item_answers), measures)


def _print(options: argparse.Namespace, model: Path, results: list[dict[str, Any]]) -> None:
    # the table is whole in a file too
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table(results))
    if options.output is not None:
        with writing(options.output):
            text = json.dumps({"model": str(model), "results": results}, indent=1, ensure_ascii=False)
            options.output.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments), Launch.from_environment()), is_first_process)


if __name__ == "__main__":
    sys.exit(main())
