"""Continues prompts with a trained model, or answers them with one that was fine-tuned on conversations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, printable, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import parse_json, write_atomically
from pangu.data.boundaries import describe_ids
from pangu.evaluation.generation import Sampling, continue_prompts, encode_prompts, require_fitting, text_ids
from pangu.evaluation.inference import LoadedModel
from pangu.interop.loading import load_model
from pangu.metrics.progress import ProgressBar
from pangu.models.size import num_parameters
from pangu.prepare.chat import ChatPrompts
from pangu.prepare.messages import read_prompt
from pangu.tasks.arguments import add_model_arguments, connected, require_positive
from pangu.topology.launch import Launch, is_first_process

_EXAMPLE = """examples:
  python scripts/generate.py runs/quickstart --prompt 'def ' --prompt 'import ' --max-tokens 40
  torchrun --nproc-per-node=2 scripts/generate.py runs/quickstart --tensor 2 \\
      --prompts prompts.jsonl --output texts.jsonl --temperature 0.8 --top-p 0.9
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one text per line or, in a file named *.jsonl, one {"prompt": TEXT} or {"messages": [...]} per line',
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue plain text; without it, a model fine-tuned on conversations treats each prompt as a "
        "user message in its chat template, and only its answer is printed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write one JSON object per line: prompt (as the model saw it), text, tokens, end (stop: end of document, "
        "length: --max-tokens, window: model.sequence); without it, texts are printed",
    )
    parser.add_argument("--max-tokens", type=int, default=100, help="maximum number of new tokens (100)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most probable token (1)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most probable tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most probable tokens with this total probability (1)"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="divide the scores of tokens that occurred before by this number (1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed: the same seed and prompt give the same text (0)")
    options = parser.parse_args(arguments)
    require_positive(parser, options)
    return options


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Return the prompts of a file, each with its text as `prompt`, or with `messages`. Raises UserError naming the
    first line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: cannot be read ({error})") from error
    if path.suffix != ".jsonl":
        return [{"prompt": line} for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not ("messages" in record or isinstance(record.get("prompt"), str)):
            raise UserError(f'{path}, line {number}: must be a JSON object like {{"prompt": "some text"}}')
        prompts.append(record)
    return prompts


def encode_chat(chat: ChatPrompts, records: Sequence[dict[str, Any]], window: int) -> list[list[int]]:
    """Return the ids of conversations. Raises UserError, naming the first that is none, or those that are too long."""
    dialogs = []
    for number, record in enumerate(records, 1):
        try:
            dialogs.append(read_prompt(record))
        except ValueError as error:
            raise UserError(f"prompt {number}: {error}") from error
    prompts = chat.encode(dialogs)
    require_fitting([str(number) for number in range(1, len(prompts) + 1)], prompts, window)
    return prompts


def encode(
    model: LoadedModel, records: Sequence[dict[str, Any]], sampling: Sampling, *, raw: bool
) -> tuple[list[list[int]], Sampling, bool]:
    """Return the ids of prompts, the sampling with what ends an answer, and whether a chat template was applied.
    Raises UserError."""
    assert model.tokenizer is not None
    template = None if raw else model.read_template()
    if template is not None:
        chat = ChatPrompts(template, model.tokenizer, model.eod)
        sampling = replace(sampling, stop=chat.stop, end=chat.end)
        return encode_chat(chat, records, model.config.sequence), sampling, True
    texts: list[str] = []
    for number, record in enumerate(records, 1):
        if "messages" in record:
            why = "--raw takes texts" if raw else "the model was not fine-tuned on conversations"
            raise UserError(f'prompt {number}: has messages, and {why}; use {{"prompt": "some text"}}')
        texts.append(record["prompt"])
    return encode_prompts(texts, model.tokenizer, model.eod, model.config.sequence, model.bos), sampling, False


def run(options: argparse.Namespace, launch: Launch) -> None:
    """Carry out the command. Raises UserError."""
    sampling = Sampling(
        options.max_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.repetition_penalty,
        options.seed,
    )
    records = [{"prompt": text} for text in options.prompt or ()] or read_prompts(options.prompts)
    with connected(options.tensor, options.pipeline, options.device, launch, replicas=False) as mesh:
        model = load_model(options.model, mesh, options.precision, rows=options.rows)
        if model.tokenizer is None:
            raise UserError(f"{options.model}: has no tokenizer; set data.tokenizer in its run")
        prompts, sampling, is_chat = encode(model, records, sampling, raw=options.raw)
        if mesh.is_first:
            size = f"{num_parameters(model.config):,} parameters in {model.runner.dtype} on {mesh.device}"
            print(f"{options.model}: {size}".replace("torch.", ""), file=sys.stderr)
            print(printable(describe_ids(model.tokenizer, model.eod, model.bos)), file=sys.stderr)
            if is_chat:
                print(
                    "prompts are rendered as messages of the chat template; use --raw to continue them as text",
                    file=sys.stderr,
                )
        _continue(model, prompts, sampling, options.output, is_chat=is_chat)


def _continue(
    model: LoadedModel, prompts: list[list[int]], sampling: Sampling, output: Path | None, *, is_chat: bool
) -> None:
    """Draw the texts; the first process prints or writes them. Prompts of a conversation are not printed."""
    if not model.mesh.is_first:
        continue_prompts(model, prompts, sampling)
        return
    if output is not None:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
    live = output is None and len(prompts) == 1 and sys.stdout.isatty()
    with ProgressBar(not live) as progress:
        task = progress.add_task("Drawing text", total=None)

        def show(_: int, text: str) -> None:
            if live:
                print(printable(text), end="", flush=True)
            progress.advance(task)

        if live and not is_chat and model.tokenizer is not None:
            print(printable(model.tokenizer.decode(text_ids(prompts[0], model.bos))), end="", flush=True)
        texts = continue_prompts(model, prompts, sampling, on_text=show)
    if output is not None:
        lines = [json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts]
        with writing(output):
            write_atomically(output, "".join(lines).encode())
    else:
        print(
            "" if live else "\n\n".join(printable(text.text if is_chat else text.prompt + text.text) for text in texts)
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments), Launch.from_environment()), is_first_process)


if __name__ == "__main__":
    sys.exit(main())
