"""Conversations rendered by chat templates: which parts of the text are responses, and prompts for the next one.

Templates are written in Jinja, as in transformers, and may be untrusted; `sandbox` limits what they may do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import TemplateError

from pangu.checkpoint.run_folder import CHAT_TEMPLATE, kept_tokenizer, read_text
from pangu.common.errors import UserError, shown
from pangu.common.files import read_json_object, refuse_links
from pangu.config.data import DataConfig, InstructionsData
from pangu.data.boundaries import piece_of
from pangu.data.sources import with_ids
from pangu.data.token_spans import SEPARATOR, encode_parts
from pangu.data.tokenizers import Tokenizer, cached_tokenizer
from pangu.prepare.messages import BEGIN, END, Dialog, Message, map_text, unwritten
from pangu.prepare.sandbox import Allowance, template_environment

T = TypeVar("T")

TEMPLATES: dict[str, str] = yaml.safe_load((Path(__file__).parent / "templates.yaml").read_text(encoding="utf-8"))
"""Built-in chat templates by name."""
FINE_TUNED = "{# Chat template of the conversations that this model was fine-tuned on #}\n"
"""First line of `ChatTemplate.portable`. Jinja removes it together with its newline."""


class ChatTemplate:
    """Chat template, by its name in `TEMPLATES` or by path: Jinja, tokenizer_config.json or a folder with one."""

    def __init__(
        self, name: str, special: Mapping[str, int], eod: int | None, bos: int | None = None, text: str | None = None
    ) -> None:
        """Read a template. Raises UserError for a file that is missing or holds no template.

        Args:
            name: name in `TEMPLATES`, or a path.
            special: special pieces and their ids; no text spells them.
            eod: end-of-document id.
            bos: beginning-of-text id.
            text: the template itself, for which `name` is then only a label.
        """
        text, tokens = read_template(name) if text is None else (text, {})
        self._name, self._special = name, sorted(special, key=len, reverse=True)
        pieces = {token: piece for piece, token in special.items()}
        end = None if eod is None else pieces.get(eod)
        beginning = "" if bos is None else pieces.get(bos, "")
        self._tokens = {"bos_token": beginning} | ({} if end is None else {"eos_token": end}) | tokens
        if name in ("plain", "alpaca") and end is None:
            raise UserError(
                f"data.template = {name}: needs a tokenizer with an end-of-document token, which ends responses"
            )
        self.portable = self._portable(text, beginning)
        """Template text for any program: it spells the pieces of this tokenizer, and what begins a text."""
        environment = template_environment()
        try:
            with Allowance() as allowance:
                self._template = allowance.spend(lambda: environment.from_string(text))
        except TemplateSyntaxError as error:
            raise UserError(f"{name}: the chat template, line {error.lineno}: {shown(str(error.message))}") from error
        except Exception as error:  # constant expressions are evaluated here
            raise UserError(f"{name}: the chat template cannot be read ({shown(_reason(error))})") from error

    def parts(self, dialog: Dialog, allowance: Allowance) -> list[tuple[str, bool]]:
        """Render a conversation as (text, whether the loss counts it) parts.

        `SEPARATOR` splits the tokenizer's special pieces that occur in a message. Raises ValueError, with the reason,
        if the template fails, writes no tools of a conversation, or writes a turn so that its response is not located.
        """
        messages = [map_text(message, self._hold_apart) for message in dialog.messages]
        tools = map_text(dialog.tools, self._hold_apart)

        def render() -> tuple[str, list[tuple[str, bool]]]:
            text = self._render(messages, tools, more=False)
            return text, _marked(text) if BEGIN in text else self._by_turns(messages, tools, text, dialog.counted)

        output, parts = self._spend(allowance, ValueError, render)
        if name := unwritten(Dialog(messages, tools, []), output):
            reason = f"does not render the function {shown(name)}; use qwen3 or the model's own"
            raise ValueError(f"the chat template {self._name} {reason}")
        return self._count(parts, dialog.counted)

    def _portable(self, text: str, beginning: str) -> str:
        # Built-in templates leave the beginning to the encoder; a template file writes it where its model needs it
        writes_beginning = text.startswith(f"{{{{ '{beginning}' }}}}") or self._name not in TEMPLATES
        if beginning and not writes_beginning:
            text = "{{ bos_token }}" + text
        used = {name: piece for name, piece in self._tokens.items() if name.isidentifier() and name in text}
        # json.dumps writes valid Jinja strings. A block at the end of its line leaves the template's first line as is.
        pieces = [f"{{% set {name} = {json.dumps(piece, ensure_ascii=False)} %}}\n" for name, piece in used.items()]
        return "".join([FINE_TUNED, *pieces, text])

    def prompt(self, dialog: Dialog, allowance: Allowance) -> str:
        """Render a conversation up to its next response. Raises ValueError, with the reason, if the template fails."""
        messages = [map_text(message, self._hold_apart) for message in dialog.messages]
        tools = map_text(dialog.tools, self._hold_apart)
        text = self._spend(allowance, ValueError, lambda: self._render(messages, tools, more=True))
        return text.replace(BEGIN, "").replace(END, "")

    def end_of_turn(self) -> str:
        """Return what the template writes after a response, without trailing space; "" if it writes nothing."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{SEPARATOR}"}]
        with Allowance() as allowance:
            text = self._spend(allowance, UserError, lambda: self._render(messages, [], more=False))
        tail = text.rpartition(SEPARATOR)[2].partition(END)[0]
        return tail.rstrip() or tail

    def _spend(self, allowance: Allowance, kind: type[Exception], render: Callable[[], T]) -> T:
        """Return the result of `render`, or raise an error of this kind with the reason: a template may raise any."""
        try:
            return allowance.spend(render)
        except Exception as error:
            raise kind(f"the chat template {self._name} fails: {shown(_reason(error))}") from error

    def _by_turns(
        self, messages: Sequence[Message], tools: list[Any], output: str, counted: Sequence[bool]
    ) -> list[tuple[str, bool]]:
        """Return the parts of a conversation whose template does not mark the responses."""
        parts, place = [], 0
        places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number, counts in zip(places, counted, strict=True):
            # A response that does not count need not be located
            begin, end = self._response(messages, number, tools, output, place) if counts else (place, place)
            parts += [(output[place:begin], False), (output[begin:end], True)]
            place = end
        return [*parts, (output[place:], False)]

    def _response(
        self, messages: Sequence[Message], number: int, tools: list[Any], output: str, place: int
    ) -> tuple[int, int]:
        """Return the span of a response after `place`, up to the next turn. Raises TemplateError if it is unclear."""
        turns = messages[: number + 1]
        asked = self._render(turns[:-1], tools, more=True)
        answered = self._render(turns, tools, more=False)
        if output.startswith(answered) and answered.startswith(asked):
            return len(asked), len(answered)
        # Some templates write a turn differently once others follow, e.g. without its reasoning. A mark in its text
        # shows where the text is, and how much of the turn is written after it.
        marked = _mark_end(messages[number])
        _, _, tail = self._render([*turns[:-1], marked], tools, more=False).partition(END)
        before, _, after = self._render([*turns[:-1], marked, *messages[number + 1 :]], tools, more=False).partition(
            END
        )
        prompt = asked.removeprefix(self._render(turns[:-1], tools, more=False))
        begin = before.rfind(prompt, place) + len(prompt)
        is_clear = prompt and begin >= len(prompt) and prompt not in messages[number]["content"]
        if not (tail and before + after == output and after.startswith(tail) and is_clear):
            raise TemplateError(
                f"it renders turn {number} differently if others follow; set data.turns=last, or mark responses in it"
                " with {% generation %} and {% endgeneration %}"
            )
        return begin, len(before) + len(tail)

    def _count(self, parts: list[tuple[str, bool]], counted: Sequence[bool]) -> list[tuple[str, bool]]:
        """Return the parts with only the responses selected by `counted` in the loss."""
        if all(counted):
            return parts
        if sum(is_response for _, is_response in parts) != len(counted):
            raise ValueError(f"the chat template {self._name} does not mark each response exactly once")
        counts = iter(counted)
        return [(text, is_response and next(counts)) for text, is_response in parts]

    def _render(self, messages: Sequence[Message], tools: list[Any], *, more: bool) -> str:
        return self._template.render(messages=messages, tools=tools or None, add_generation_prompt=more, **self._tokens)

    def _hold_apart(self, text: str) -> str:
        for piece in self._special:
            if piece in text:
                text = text.replace(piece, piece[0] + SEPARATOR + piece[1:])
        return text


def spelled_end(tokenizer: Tokenizer, eod: int | None) -> tuple[int | None, dict[int, int]]:
    """Return the id whose piece a chat template writes for `eod`, and a map from written ids to replacements."""
    # An ordinary piece that ends documents cannot be spelled: the tokenizer's own end is written in its place.
    own = tokenizer.eod
    if eod is None or own is None or eod in tokenizer.special.values():
        return eod, {}
    return own, {own: eod}


def _mark_end(message: Message) -> Message:
    """Return the message with `END` after its text, or after the name of the first function that it calls."""
    text = message["content"].rstrip()
    if text or "tool_calls" not in message:
        return {**message, "content": f"{text}{END}{message['content'][len(text) :]}"}
    first, *others = message["tool_calls"]
    named = {**first["function"], "name": first["function"]["name"] + END}
    return {**message, "tool_calls": [{**first, "function": named}, *others]}


def _marked(output: str) -> list[tuple[str, bool]]:
    parts = []
    for piece in output.split(BEGIN):
        response, end, rest = piece.partition(END)
        parts += [(response, True), (rest, False)] if end else [(piece, False)]
    return parts


def read_template(name: str) -> tuple[str, dict[str, str]]:
    """Return a template as in `ChatTemplate`, and the pieces that its tokenizer_config.json names. Raises UserError."""
    if name in TEMPLATES:
        return TEMPLATES[name], {}
    path = Path(name)
    if path.is_dir():
        jinja_file = path / "chat_template.jinja"
        path = path / "tokenizer_config.json"
        if jinja_file.is_file():
            return read_text(jinja_file), _pieces(read_json_object(path)) if path.is_file() else {}
    if path.suffix != ".json":
        if not path.is_file():
            names = ", ".join(TEMPLATES)
            raise UserError(f"data.template = {path}: no such file; use a file, or one of {names}")
        return read_text(path), {}
    config = read_json_object(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f"{path}: has no chat_template; set data.template to one of {', '.join(TEMPLATES)}")
    return template, _pieces(config)


def _pieces(config: Mapping[str, Any]) -> dict[str, str]:
    pieces = {key: piece_of(value) for key, value in config.items() if key.endswith("_token")}
    return {key: piece for key, piece in pieces.items() if piece is not None}


def _reason(error: BaseException) -> str:
    return "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__


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
        raise UserError(f"{error}; or save the template as {run / CHAT_TEMPLATE}") from error
