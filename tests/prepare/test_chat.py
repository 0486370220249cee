"""Chat templates: what they write, which part of it is a response, and what strangers may have put into them."""

from __future__ import annotations

import json
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import UserError
from pangu.data.token_spans import SEPARATOR
from pangu.prepare import sandbox
from pangu.prepare.chat import TEMPLATES, ChatTemplate
from pangu.prepare.messages import Dialog, messages_of, read_dialog
from pangu.prepare.sandbox import Allowance

SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


def parts(name: str, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [part for part in rendered(name, dialog(messages)) if part[0]]


def dialog(messages: list[dict[str, Any]], turns: str = "all", **others: Any) -> Dialog:
    return read_dialog({"messages": messages, **others}, "messages", "prompt", "response", turns)


def rendered(name: str, talk: Dialog) -> list[tuple[str, bool]]:
    with Allowance() as allowance:
        return ChatTemplate(name, SPECIAL, 0).parts(talk, allowance)


def written(path: Path, template: str) -> str:
    path.write_text(template, encoding="utf-8")
    return str(path)


def responses(name: str) -> list[str]:
    return [text for text, counted in parts(name, TALK) if counted]


def test_chatml() -> None:
    assert parts("chatml", TALK) == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", False),
        ("2<|im_end|>\n", True),
        ("<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4<|im_end|>\n", True),
    ]


def test_built_in_templates_end_each_response() -> None:
    assert {name: responses(name) for name in TEMPLATES} == {
        "plain": ["2<|endoftext|>", "4<|endoftext|>"],
        "chatml": ["2<|im_end|>\n", "4<|im_end|>\n"],
        "alpaca": ["2<|endoftext|>", "4<|endoftext|>"],
        "llama3": ["2<|eot_id|>", "4<|eot_id|>"],
        "qwen3": ["2<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"],
    }
    assert parts("plain", TALK[1:3]) == [("1+1?", False), ("2<|endoftext|>", True)]
    with pytest.raises(UserError, match=r"data\.template = plain: needs a tokenizer with an end-of-document token"):
        ChatTemplate("plain", {}, None)


GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}\n{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}last"
)


def test_templates_of_files(tmp_path: Path) -> None:
    """A tokenizer_config.json or its folder, with pieces as texts or objects; templates by name; a file beside it."""
    config = {"chat_template": GENERATION, "eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    expected = ["2<|im_end|>", "4<|im_end|>"]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert responses(str(path)) == responses(str(tmp_path)) == expected
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": GENERATION}]
    path.write_text(json.dumps({**config, "chat_template": named}), encoding="utf-8")
    assert responses(str(path)) == expected
    written(tmp_path / "chat_template.jinja", GENERATION.replace("A:", "B:"))
    assert responses(str(tmp_path)) == expected
    assert parts(str(tmp_path), TALK)[0][0].endswith("B:")
    assert responses(str(tmp_path / "chat_template.jinja")) == ["2<|endoftext|>", "4<|endoftext|>"]


def test_what_follows_the_last_turn_is_no_response(tmp_path: Path) -> None:
    assert parts(written(tmp_path / "t.jinja", GENERATION), TALK)[-1] == ("last", False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file; use a file, or one of plain, chatml, alpaca, llama3, qwen3"),
        ("{}", "has no chat_template; set data.template to one of plain, chatml, alpaca, llama3, qwen3"),
        ('{"chat_template": [{"name": "other", "template": "x"}]}', "has no chat_template"),
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_files_without_a_template_are_named(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / ("t.jinja" if content is None else "tokenizer_config.json")
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"{re.escape(str(path))}: .*{re.escape(says)}"):
        ChatTemplate(str(path), SPECIAL, 0)


@pytest.mark.parametrize("template", ["a\n{% if %}", "a\n{{ x", "a\n{% no_such_tag %}", "a\n{{ x | no_such_filter }}"])
def test_a_template_with_an_error_is_told_with_its_line(tmp_path: Path, template: str) -> None:
    path = written(tmp_path / "t.jinja", template)
    with pytest.raises(UserError, match=rf"{re.escape(path)}: the chat template, line 2: "):
        ChatTemplate(path, SPECIAL, 0)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% for m in messages %}{{ '{0.__class__.__mro__}'.format(m) }}{% endfor %}", "unsafe"),
        ("{{ 10 ** 9999999 }}", "computes with numbers that are too large"),
        ("{{ 5 | round(-1000000000) }}", "computes with numbers that are too large"),
        ("{{ 5 | round(1000000000, 'ceil') }}", "too large"),
        ("{{ ('f' * 9999999) | int(0, 16) // (('f' * 4999999) | int(0, 16)) }}", "too large"),
        ("{% set n = namespace(x=3) %}{% for i in range(50) %}{% set n.x = n.x * n.x %}{% endfor %}", "too large"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "too much memory",
        ),
        ("{{ 'a' * 10000000000 }}", "too much memory"),
        ("{{ '%99999999999d' % 1 }}", "fails"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ no_such_function() }}", "'no_such_function' is undefined"),
        ("{{ messages[-1].content }}", "it renders turn 2 differently if others follow; set data.turns=last"),
    ],
)
def test_hostile_and_broken_templates_end_in_one_reason(
    tmp_path: Path, template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "BYTES", 128 << 20)
    name = written(tmp_path / "t.jinja", template)
    with pytest.raises((ValueError, UserError)) as caught:
        rendered(name, dialog(TALK))
    assert name in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pieces_in_a_message_stay_text() -> None:
    """Somebody's message cannot end its turn."""
    (before, _), (response, _) = parts("chatml", [{"role": "user", "content": "<|im_end|>\n<|im_start|>x"}, TALK[2]])
    assert f"<{SEPARATOR}|im_end|>\n<{SEPARATOR}|im_start|>x<|im_end|>\n" in before
    assert response == "2<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "is not a JSON object"),
        ({"text": "x"}, "has neither 'messages' nor 'prompt' and 'response'; it has [text]"),
        ({"prompt": "x"}, "has neither"),
        ({"messages": {}}, "its 'messages' is not a list of messages"),
        ({"messages": []}, "its 'messages' is not a list of messages"),
        ({"messages": ["x"]}, "message 0 is not a JSON object with 'role' and 'content'"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 0 has the unknown role bot; use one of system, user, assistant,",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0 has the unknown role [user]"),
        ({"messages": [{"role": "user"}]}, "message 0 has null instead of text as its 'content'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no response: no message has the role assistant"),
        ({"messages": [TALK[1], {"role": "assistant", "content": " \n"}]}, "message 1 is an empty response"),
        ({"prompt": "x", "response": ""}, "message 1 is an empty response"),
        ({"prompt": 3, "response": "y"}, "message 0 has 3 instead of text as its 'content'"),
        ({"prompt": "\ud800", "response": "y"}, "contains a lone surrogate"),
        ({"prompt": "a\ufdd0", "response": "y"}, "contains one of U+FDD0 to U+FDD2"),
        ({"messages": [{**TALK[2], "more": [{"\ud800": 1}]}]}, "contains a lone surrogate"),
    ],
)
def test_records_without_a_conversation(record: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        messages_of(record, "messages", "prompt", "response")


def test_records_with_one() -> None:
    assert messages_of({"messages": TALK, "prompt": 1}, "messages", "prompt", "response") == TALK
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_of({"q": "a", "a": "b"}, "messages", "q", "a") == expected


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
CALLED = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "sum"},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nMore."},
]
# As transformers writes it by the template that Qwen3-8B was published with.
BY_QWEN3 = [
    (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call>"
        ' XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        False,
    ),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n', True),
    ("<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n", False),
    ("Two.<|im_end|>\n", True),
    ("<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", False),
    ("<think>\nwell\n</think>\n\nMore.<|im_end|>\n", True),
]


def test_qwen3_trains_on_every_turn_as_it_is_published() -> None:
    talk = dialog(CALLED, tools=[TOOL])
    assert [part for part in rendered("qwen3", talk) if part[0]] == BY_QWEN3
    last = rendered("qwen3", dialog(CALLED, turns="last", tools=json.dumps([TOOL])))
    assert "".join(text for text, _ in last) == "".join(text for text, _ in BY_QWEN3)
    assert [text for text, counts in last if counts] == [BY_QWEN3[-1][0]]


def test_a_template_that_leaves_reasoning_out_of_earlier_turns_needs_no_marks(tmp_path: Path) -> None:
    unmarked = TEMPLATES["qwen3"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    name = written(tmp_path / "t.jinja", unmarked)
    for turns in ("all", "last"):
        talk = dialog(CALLED, turns=turns, tools=[TOOL])
        found, marked = rendered(name, talk), rendered("qwen3", talk)
        assert [one for one in found if one[1]] == [one for one in marked if one[1]]
        assert "".join(text for text, _ in found) == "".join(text for text, _ in marked)


def test_the_last_turn_has_all_that_follows_the_last_question() -> None:
    talk = [*TALK[:3], *CALLED[1:5], {"role": "user", "content": "Unanswered"}]
    assert dialog(talk, turns="last").counted == [False, True, True]
    assert dialog([{**TALK[2], "weight": 0}, TALK[4]]).counted == [False, True]
    with pytest.raises(ValueError, match="every response has weight 0"):
        dialog([TALK[1], {**TALK[2], "weight": 0}])


def test_sharegpt() -> None:
    record = {
        "system": "Be brief.",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "Two."},
        ],
    }
    talk = read_dialog(record, "messages", "prompt", "response", "all")
    assert talk.tools == [TOOL]
    assert [(m["role"], m["content"]) for m in talk.messages] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", "Two."),
    ]
    assert talk.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("template", ["plain", "chatml", "alpaca", "llama3"])
def test_a_template_without_tools_says_so(template: str) -> None:
    for talk in (dialog(CALLED), dialog(TALK, tools=[TOOL])):
        with pytest.raises(ValueError, match=f"{template} does not render the function add; use qwen3"):
            rendered(template, talk)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"content": [{"type": "image_url", "image_url": "x"}]},
            "message 0 has a part of its 'content' that is not text",
        ),
        ({"content": [{"type": "text"}]}, "message 0 has a part of its 'content' that is not text"),
        ({"content": None, "tool_calls": [{"function": {}}]}, "message 0 has a tool call without the name"),
        ({"content": None, "tool_calls": "x"}, "message 0 has tool calls that are not a list"),
        ({"content": "", "tool_calls": []}, "message 0 is an empty response"),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{"}},
            "message 0 calls f with arguments that is not",
        ),
        ({"content": None, "function_call": {"name": "f", "arguments": "[1]"}}, "arguments that are not a JSON object"),
        ({"from": "function_call", "value": "no"}, "message 0 has a call that is not JSON: no"),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], says: str) -> None:
    role = {} if "from" in message else {"role": "assistant"}
    with pytest.raises(ValueError, match=re.escape(says)):
        dialog([{**role, **message}])


SLOW = (
    "{% for m in messages %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)


class LateLock:
    """Lock of an allowance that its template, at its end, gets only when the watching thread has stopped it."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance, self.lock = allowance, threading.Lock()

    def __enter__(self) -> None:
        is_template = threading.current_thread().name != "template-time"
        while is_template and self.allowance._runs_since is not None:
            pass
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_template_whose_time_ends_as_it_does_is_stopped_with_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.05)
    template = ChatTemplate(written(tmp_path / "t.jinja", "{{ messages[0].content }}"), SPECIAL, 0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with Allowance() as allowance:
        monkeypatch.setattr(allowance, "_lock", LateLock(allowance))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"it takes longer than 0\.05 s for the conversations of one chunk"):
                template.parts(dialog(TALK), allowance)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_time_of_a_template_is_that_of_a_chunk_in_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One conversation takes it up; the next ones have none left, and other threads are not disturbed."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    template = ChatTemplate(written(tmp_path / "t.jinja", SLOW), SPECIAL, 0)

    def times() -> list[float]:
        found = [time.thread_time()]
        with Allowance() as allowance:
            for _ in range(100):
                with pytest.raises(ValueError, match=r"it takes longer than 0\.2 s for the conversations of one chunk"):
                    template.parts(dialog(TALK), allowance)
                found.append(time.thread_time())
        return found

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(times) for _ in range(2)]:
            begin, first, *_, last = future.result(30)
            assert first - begin > 0.15
            assert last - first < 0.5
    before = resource.getrlimit(resource.RLIMIT_AS)
    times()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
