"""Prompts for a model that was fine-tuned on conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pangu.checkpoint.run_folder import CHAT_TEMPLATE, kept_tokenizer, read_text
from pangu.common.errors import UserError
from pangu.common.files import refuse_links
from pangu.config.data import DataConfig, InstructionsData
from pangu.data.encoding import cached_tokenizer
from pangu.data.sources import with_ids
from pangu.data.token_spans import encode_parts
from pangu.data.tokenizers import Tokenizer
from pangu.prepare.chat import ChatTemplate, spelled_end
from pangu.prepare.messages import Dialog
from pangu.prepare.sandbox import Allowance


class ChatPrompts:
    """Prompts of a chat template, formatted as in the training of its model.

    Attributes:
        stop: Ids that end a response.
        end: Text that ends a response if its template spells the end as text, else "".
    """

    def __init__(self, template: str, tokenizer: Tokenizer, eod: int | None) -> None:
        """Parse a Jinja template. Raises UserError if it is invalid."""
        self._tokenizer, special = tokenizer, tokenizer.special
        spelled, self._ids = spelled_end(tokenizer, eod)
        # as in training, a response without a prompt follows the end of a document
        self._first = [] if eod is None else [eod]
        self._template = ChatTemplate("chat_template.jinja", special, spelled, text=template)
        tail = self._template.end_of_turn()
        first = max((piece for piece in special if tail.startswith(piece)), key=len, default=None)
        self.stop = () if first is None else (self._ids.get(special[first], special[first]),)
        self.end = tail if first is None else ""

    def encode(self, dialogs: Sequence[Dialog]) -> list[list[int]]:
        """Return the ids of each conversation up to its next response. Raises UserError if the template fails."""
        prompts = []
        for number, dialog in enumerate(dialogs):
            try:
                with Allowance() as allowance:
                    text = self._template.prompt(dialog, allowance)
            except ValueError as error:
                raise UserError(f"prompt {number}: {error}; use --raw to continue plain text") from error
            (ids,) = encode_parts(self._tokenizer, [text])
            prompts.append([self._ids.get(token, token) for token in ids] or self._first)
        return prompts


def portable_template(data: InstructionsData) -> str:
    """Return `ChatTemplate.portable` of fine-tuning data. Raises UserError if it or the tokenizer cannot be read."""
    packing = with_ids(data).packing
    assert data.tokenizer is not None
    assert packing.bos != "auto"
    tokenizer = cached_tokenizer(data.tokenizer)
    spelled, _ = spelled_end(tokenizer, packing.eod)
    return ChatTemplate(data.template, tokenizer.special, spelled, packing.bos).portable


def kept_template(run: Path, data: DataConfig) -> str | None:
    """Return the chat template of fine-tuning, from the run folder or, in older runs, its data; None without one."""
    if (run / CHAT_TEMPLATE).exists():
        refuse_links([run / CHAT_TEMPLATE])
        return read_text(run / CHAT_TEMPLATE)
    if not isinstance(data, InstructionsData):
        return None
    try:
        return portable_template(replace(data, tokenizer=kept_tokenizer(run, data)))
    except UserError as error:
        raise UserError(f"{error}; or put the template into {run / CHAT_TEMPLATE}") from error
