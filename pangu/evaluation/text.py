"""Text from a model: prompts in, continuations out, also while they are being drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pangu.config.errors import UserError
from pangu.data.tokenizers import Tokenizer
from pangu.evaluation.generation import Sampling, generate
from pangu.evaluation.loaded import LoadedModel

UNFINISHED = "\ufffd"
"""What tokenizers decode the first bytes of a character to that goes on in the next token."""


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
    """As the model saw it: a tokenizer may know fewer characters than the user typed."""
    text: str
    tokens: int
    """Of the text."""
    end: str
    """`stop`: the end of a document; `length`: as many tokens as asked for; `window`: the model has no more room."""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, eod: int | None, window: int) -> list[list[int]]:
    """Ids of prompts; an empty one begins behind the end of a document.

    Raises:
        UserError: naming the prompts that are longer than the model's window, or are no text.
    """
    if wrong := [text for text in texts if not _is_text(text)]:
        raise UserError("\n".join(f"prompt {text[:40]!a}: holds bytes that are not UTF-8" for text in wrong))
    prompts = [tokenizer.encode(text) or [eod or 0] for text in texts]
    problems = [
        f"prompt {text[:40]!r}: {len(ids)} tokens, and the model looks back at {window} (model.sequence); shorten it"
        for text, ids in zip(texts, prompts, strict=True)
        if len(ids) > window
    ]
    if problems:
        raise UserError("\n".join(problems))
    return prompts


def _is_text(text: str) -> bool:
    """False for bytes of a command line that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def continue_prompts(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Continuation]:
    """Continue prompts. All ranks of a replica call it together.

    Args:
        model: one that has a tokenizer.
        prompts: from `encode_prompts`.
        sampling: how to draw.
        on_text: called with (number of the prompt, text that is new since the last call), whole characters only.

    Raises:
        UserError: as `generate`.
    """
    assert model.tokenizer is not None
    decode = model.tokenizer.decode
    ids = [list(prompt) for prompt in prompts]
    begins = [len(decode(prompt)) for prompt in prompts]
    told = list(begins)

    def tell(number: int, text: str) -> None:
        if on_text is not None and len(text) > told[number]:
            on_text(number, text[told[number] :])
            told[number] = len(text)

    def add(number: int, token: int) -> None:
        ids[number].append(token)
        if on_text is not None:
            tell(number, decode(ids[number]).rstrip(UNFINISHED))

    drawn = generate(model, prompts, sampling, on_token=add)
    results = []
    for number, text in enumerate(map(decode, ids)):
        tell(number, text)
        begin = begins[number]
        end = _end(len(drawn[number]), sampling.max_tokens, model.config.sequence + 1 - len(prompts[number]))
        results.append(Continuation(text[:begin], text[begin:], len(drawn[number]), end))
    return results


def _end(length: int, wanted: int, room: int) -> str:
    """Why a text of so many tokens ended."""
    if length < min(wanted, room):
        return "stop"
    return "length" if wanted <= room else "window"
