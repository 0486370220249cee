"""Conversations as text: chat templates, and which part of what they write is a response.

A template is written in Jinja, as transformers has it, and may come from strangers: it is rendered by Jinja's sandbox,
which gives no access to Python, within limits of time and memory.
"""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pangu.config.errors import UserError, reading, shown
from pangu.config.files import read_json_object

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]

# Published by those who trained such models; `plain` is this package's own.
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "alpaca": "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "llama3": "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
}

BEGIN, END, APART = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around what a template marks as a response; between characters that must not become one special piece. Unicode has
them for such uses: no text holds them."""

_SECONDS = 5.0
_BYTES = 1 << 30
_LARGEST = 4096
"""Bits of a number that a template computes."""


class ChatTemplate:
    """A template, by the name of one of `TEMPLATES` or the path of a file: a tokenizer_config.json or a folder with
    one, or Jinja. Raises UserError for a file that is missing or holds no template."""

    def __init__(self, name: str, special: Mapping[str, int], eod: int | None) -> None:
        """`special`: pieces of the tokenizer that no text spells; `eod`: the id of the one that ends a document."""
        text, tokens = read_template(name)
        self._name, self._special = name, sorted(special, key=len, reverse=True)
        end = next((piece for piece, token in special.items() if token == eod), None)
        self._tokens = ({} if end is None else {"eos_token": end}) | tokens
        if name in ("plain", "alpaca") and end is None:
            raise UserError(
                f"data.template = {name}: needs a tokenizer with an end of a document, which ends responses"
            )
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, "jinja2.ext.loopcontrols"]
        )
        environment.filters |= {"tojson": _to_json, "round": _rounded}
        environment.globals["raise_exception"] = _refuse
        try:
            with _bounded():
                self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise UserError(f"{name}: the chat template, line {error.lineno}: {shown(str(error.message))}") from error
        except Exception as error:  # what is constant is computed at once
            raise UserError(f"{name}: the chat template cannot be read ({shown(_reason(error))})") from error

    def parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """What the template writes for a conversation, cut into parts that are a response or not. Pieces of the
        tokenizer that stand in a message are held apart by `APART`, which is to be taken out again. Raises ValueError,
        with the reason, if the template fails or writes a turn otherwise once others follow."""
        messages = [_map_text(message, self._held_apart) for message in messages]
        try:
            with _bounded():
                whole = self._render(messages, more=False)
                if BEGIN in whole:
                    return _marked(whole)
                return self._by_turns(messages, whole)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template {self._name} fails: {shown(_reason(error))}") from error

    def _by_turns(self, messages: Sequence[Message], whole: str) -> list[tuple[str, bool]]:
        """A response is what is written for its turn behind what asks for it."""
        parts, place = [], 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self._render(messages[:number], more=True)
                answered = self._render(messages[: number + 1], more=False)
                if not (whole.startswith(answered) and answered.startswith(asked) and place <= len(asked)):
                    raise TemplateError(
                        "it writes a turn otherwise once others follow; {% generation %} and {% endgeneration %} in"
                        " it would mark responses"
                    )
                parts += [(whole[place : len(asked)], False), (answered[len(asked) :], True)]
                place = len(answered)
        return [*parts, (whole[place:], False)]

    def _render(self, messages: Sequence[Message], *, more: bool) -> str:
        return self._template.render(messages=messages, add_generation_prompt=more, **self._tokens)

    def _held_apart(self, text: str) -> str:
        for piece in self._special:
            if piece in text:
                text = text.replace(piece, piece[0] + APART + piece[1:])
        return text


def messages_of(record: Any, messages_key: str, prompt_key: str, response_key: str) -> list[dict[str, Any]]:
    """The conversation of a record: its messages, or a prompt and a response. Raises ValueError, with the reason."""
    if not isinstance(record, dict):
        raise ValueError("is no JSON object")
    if messages_key in record:
        messages = record[messages_key]
    elif prompt_key in record and response_key in record:
        messages = [
            {"role": "user", "content": record[prompt_key]},
            {"role": "assistant", "content": record[response_key]},
        ]
    else:
        keys = f"neither {messages_key!r} nor {prompt_key!r} and {response_key!r}"
        raise ValueError(f"has {keys}; it has {shown(sorted(record))}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"its {messages_key!r} is no list of messages")
    for number, message in enumerate(messages):
        _check(message, f"message {number}")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no response: no message is of the role assistant")
    return messages


def _check(message: Any, place: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is no JSON object with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{place} has the unknown role {shown(role)}; {', '.join(ROLES)} are known")
    if not isinstance(content, str):
        raise ValueError(f"{place} has no text as its 'content', but {shown(content)}")
    if role == "assistant" and not content.strip():
        raise ValueError(f"{place} is an empty response")
    _map_text(message, _check_text)


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    if any(sign in text for sign in (BEGIN, END, APART)):
        raise ValueError("holds one of U+FDD0 to U+FDD2, which are no characters")
    return text


def _map_text(value: Any, function: Any) -> Any:
    """The same with every text in it replaced."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _map_text(part, function) for key, part in value.items()}
    return [_map_text(part, function) for part in value] if isinstance(value, list) else value


def _marked(whole: str) -> list[tuple[str, bool]]:
    """The parts of a text with marks around responses."""
    parts = []
    for piece in whole.split(BEGIN):
        response, end, rest = piece.partition(END)
        parts += [(response, True), (rest, False)] if end else [(piece, False)]
    return parts


def read_template(name: str) -> tuple[str, dict[str, str]]:
    """A template as in `ChatTemplate`, and the pieces that stand beside it in a tokenizer_config.json. Raises
    UserError."""
    if name in TEMPLATES:
        return TEMPLATES[name], {}
    path = Path(name)
    if path.is_dir():
        beside = path / "chat_template.jinja"
        path = path / "tokenizer_config.json"
        if beside.is_file():
            return _read_text(beside), _pieces(read_json_object(path)) if path.is_file() else {}
    if path.suffix != ".json":
        if not path.is_file():
            names = ", ".join(TEMPLATES)
            raise UserError(f"data.template = {path}: no such file; {names} are built in")
        return _read_text(path), {}
    config = read_json_object(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f"{path}: has no chat_template; {', '.join(TEMPLATES)} are built in (data.template)")
    return template, _pieces(config)


def _read_text(path: Path) -> str:
    with reading(path, UnicodeDecodeError, rule="is not UTF-8"):
        return path.read_text(encoding="utf-8")


def _pieces(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and others, which are texts or objects with a `content`."""
    pieces = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            pieces[key] = text
    return pieces


class _Marked(Extension):
    """`{% generation %}` and `{% endgeneration %}` around a response, as transformers has them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which numbers stay small: no signal stops Python while it computes one."""

    intercepted_binops = frozenset({"*", "**", "/", "//", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
        return super().call_binop(context, operator, left, right)


def _check_size(bits: int) -> None:
    if bits > _LARGEST:
        raise SecurityError("it computes with numbers that are too large")


def _rounded(value: Any, precision: int = 0, method: str = "common") -> Any:
    """Jinja's filter, which raises 10 to that power."""
    _check_size(4 * abs(precision) + (value.bit_length() if isinstance(value, int) else 0))
    return FILTERS["round"](value, precision, method)


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    """Without the escapes of Jinja's own filter, which are for web pages."""
    allowed = {name: option for name, option in options.items() if name in ("indent", "separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=False, **allowed)


def _reason(error: BaseException) -> str:
    return "it takes too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise TimeoutError if the block takes seconds, in the main thread, and MemoryError if it takes a GiB."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + _BYTES if statm.exists() else soft
    within = min((bound for bound in (limit, soft, hard) if bound != resource.RLIM_INFINITY), default=soft)
    is_main = threading.current_thread() is threading.main_thread()
    before = (signal.signal(signal.SIGALRM, stop) if is_main else None) or signal.SIG_DFL
    resource.setrlimit(resource.RLIMIT_AS, (within, hard))
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
