"""Conversations of a record, converted to one form from OpenAI, ShareGPT and prompt-and-response files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pangu.common.errors import shown
from pangu.common.files import parse_json
from pangu.data.token_spans import SEPARATOR

ROLES = ("system", "user", "assistant", "tool")
BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around what a template declares to be a response. Unicode reserves them, and `SEPARATOR`, for internal uses: no
text contains them."""

Message = Mapping[str, Any]

_OTHER_ROLES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Role names of other programs, mapped to `ROLES`."""
_TEXT_PARTS = ("text", "input_text", "output_text")


class Dialog(NamedTuple):
    """Conversation to train on."""

    messages: list[dict[str, Any]]
    """Messages with a `role` of `ROLES` and a text as `content`; an assistant's may have `tool_calls`."""
    tools: list[Any]
    """Definitions of the functions that the assistant may call."""
    counted: list[bool]
    """Flags of the assistant messages: whether the loss counts each of them."""


def read_dialog(record: Any, messages_key: str, prompt_key: str, response_key: str, turns: str) -> Dialog:
    """Read the conversation of a record. Raises ValueError, with the reason, if there is none.

    `turns`: `all` counts every response, `last` those after the last user message that has a response after it. A
    message with a `weight` of 0, as in OpenAI's format, is not counted.
    """
    messages = messages_of(record, messages_key, prompt_key, response_key)
    responses = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    users = [n for n, message in enumerate(messages) if message["role"] == "user" and n < responses[-1]]
    first = max(users, default=0) if turns == "last" else 0
    counted = [number >= first and messages[number].get("weight", 1) != 0 for number in responses]
    if not any(counted):
        raise ValueError("every response has weight 0, so there is nothing to train on")
    return Dialog(messages, _tools(record.get("tools")), counted)


def messages_of(record: Any, messages_key: str, prompt_key: str, response_key: str) -> list[dict[str, Any]]:
    """Return the messages of a record, or its prompt and response as messages. Raises ValueError, with the reason."""
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    key = messages_key if messages_key in record or "conversations" not in record else "conversations"
    if key in record:
        messages = record[key]
    elif prompt_key in record and response_key in record:
        messages = [
            {"role": "user", "content": record[prompt_key]},
            {"role": "assistant", "content": record[response_key]},
        ]
    else:
        keys = f"neither {messages_key!r} nor {prompt_key!r} and {response_key!r}"
        raise ValueError(f"has {keys}; it has {shown(sorted(record))}")
    messages = _listed(record, key, messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no response: no message has the role assistant")
    return messages


def read_prompt(record: Any) -> Dialog:
    """Read a conversation to respond to, or `prompt` as a user message. Raises ValueError, with the reason, if none."""
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    key = next((key for key in ("messages", "conversations") if key in record), "prompt")
    if key not in record:
        raise ValueError(f"has neither 'prompt' nor 'messages'; it has {shown(sorted(record))}")
    messages = record[key] if key != "prompt" else [{"role": "user", "content": record[key]}]
    return Dialog(_listed(record, key, messages), _tools(record.get("tools")), [])


def _listed(record: Mapping[str, Any], key: str, messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a record under `key`, after its own system prompt if it has one."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"its {key!r} is not a list of messages")
    messages = [_message(message, f"message {number}") for number, message in enumerate(messages)]
    system = record.get("system")  # next to the messages, as in ShareGPT
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": map_text(system, _check_text)}, *messages]
    return messages


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is not a JSON object with 'role' and 'content'")
    given = message.get("role", message.get("from"))
    role = _OTHER_ROLES.get(given, given) if isinstance(given, str) else given
    if role not in ROLES:
        raise ValueError(f"{place} has the unknown role {shown(role)}; use one of {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    calls = message.get("tool_calls")
    if given == "function_call":  # ShareGPT: the call, or several, as JSON
        content, calls = None, _parsed(content, f"{place} has a call")
    elif not calls and message.get("function_call"):  # OpenAI until 2023
        calls = message["function_call"]
    if isinstance(calls, dict):
        calls = [calls]
    left = {key: value for key, value in message.items() if key not in ("from", "value", "function_call", "tool_calls")}
    read = {**left, "role": role, "content": _text(content, place, empty=bool(calls))}
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{place} has tool calls that are not a list or not the assistant's: {shown(calls)}")
        read["tool_calls"] = [_call(call, place) for call in calls]
    elif role == "assistant" and not read["content"].strip():
        raise ValueError(f"{place} is an empty response")
    map_text(read, _check_text)
    return read


def _text(content: Any, place: str, *, empty: bool) -> str:
    """Return the text of a message, which may be a list of parts; None is allowed if `empty`."""
    if content is None and empty:
        return ""
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") not in _TEXT_PARTS
                or not isinstance(part.get("text"), str)
            ):
                raise ValueError(f"{place} has a part of its 'content' that is not text: {shown(part)}")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place} has {shown(content)} instead of text as its 'content'")
    return content


def _call(call: Any, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} has a tool call without the name of a function: {shown(call)}")
    arguments = _parsed(function.get("arguments") or {}, f"{place} calls {shown(function['name'])} with arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"{place} calls {shown(function['name'])} with arguments that are not a JSON object")
    named = {key: call[key] for key in ("id",) if key in call}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[Any]:
    tools = _parsed(tools or [], "has tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"its 'tools' is not a list of functions, but {shown(tools)}")
    map_text(tools, _check_text)
    return tools


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{what} that is not JSON: {shown(value)}") from error


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("contains a lone surrogate, which is not a character") from error
    if any(sign in text for sign in (BEGIN, END, SEPARATOR)):
        raise ValueError("contains one of U+FDD0 to U+FDD2, which are not characters")
    return text


def map_text(value: Any, function: Callable[[str], str]) -> Any:
    """Return the value with `function` applied to every text in it."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): map_text(part, function) for key, part in value.items()}
    return [map_text(part, function) for part in value] if isinstance(value, list) else value


def unwritten(dialog: Dialog, text: str) -> str | None:
    """Return the first called or defined function whose name is missing in a template's output, or None."""
    calls = [call for message in dialog.messages for call in message.get("tool_calls", ())]
    names = [one.get("function", one).get("name") for one in (*calls, *dialog.tools)]
    return next((name for name in names if isinstance(name, str) and name not in text), None)
