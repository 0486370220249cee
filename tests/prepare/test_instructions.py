"""Conversations as samples: where the loss counts, what is left out, and what ends a run."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import InstructionsData, PackingConfig, TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.data.batch import Batch, Row, batch_of
from pangu.data.loader import Loader
from pangu.data.sources import Sources, open_sources
from pangu.data.stream import Stream
from pangu.prepare.corpora import prepare
from pangu.prepare.instructions import Encoder
from pangu.topology.layout import Layout
from tests.configs import tiny
from tests.parallel.harness import small_trainer, whole
from tests.threads import Ranks

END = 256
TOKENIZER = TokenizerConfig("bytes")
PACKING = PackingConfig(None, None, reset_mask=True, reset_positions=True, method="best_fit")
SINGLE = replace(PACKING, method="single")
MASKED = ("data.packing.reset_mask=true", "data.packing.reset_positions=true", "data.packing.eod=256")
MODEL = replace(tiny().model, vocab=257, sequence=64)


def lines_file(path: Path, records: Sequence[Any]) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def instructions(folder: Path, train: Sequence[str], **others: Any) -> InstructionsData:
    values: dict[str, Any] = {
        "weights": None,
        "validation": (),
        "tokenizer": TOKENIZER,
        "template": "plain",
        "messages_key": "messages",
        "prompt_key": "prompt",
        "response_key": "response",
        "too_long": "truncate",
        "max_bad": 0,
        "workers": 1,
        "packing": PACKING,
    }
    return InstructionsData("instructions", tuple(train), folder=str(folder), **{**values, **others})


def sources_of(data: InstructionsData, model: ModelConfig = MODEL, seed: int = 0) -> Sources:
    prepare(data, model, show_progress=False)
    return open_sources(data, model, seed)


def epoch(stream: Stream) -> list[Row]:
    assert stream.num_samples is not None
    rows = [stream[index] for index in range(stream.num_samples)]
    return [row for row in rows if isinstance(row, Row)]


def conversations(row: Row) -> list[tuple[bytes, bytes]]:
    """Of each conversation of a row all but its first byte, and the same with `_` where the loss does not count; `$`:
    the end."""
    begins = [*np.flatnonzero(row.begins).tolist(), len(row.tokens)]
    seen = []
    for begin, stop in pairwise(begins):
        counted = row.counted[begin:stop]
        signs = bytes(ord("$") if token == END else token for token in row.labels[begin:stop].tolist())
        if counted.any():
            last = int(np.flatnonzero(counted)[-1]) + 1
            seen.append((signs[:last], bytes(s if c else ord("_") for s, c in zip(signs, counted, strict=True))[:last]))
    return seen


def test_the_loss_counts_at_responses_only(tmp_path: Path) -> None:
    records = [
        {"prompt": "What?", "response": "That."},
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
            ]
        },
        {"prompt": "", "response": "Alone"},
    ]
    stream = sources_of(instructions(tmp_path, [lines_file(tmp_path / "a.jsonl", records)])).train
    (row,) = epoch(stream)
    seen = dict(conversations(row))
    # an empty prompt is the end of a document, behind which all of the response counts
    assert seen == {b"hat?That.$": b"____That.$", b"b$cd$": b"b$_d$", b"Alone$": b"Alone$"}
    begin = row.labels.tolist().index(ord("A"))
    assert row.tokens[begin] == END
    assert row.begins[begin]
    assert stream.padding(0) == 64 - 10 - 5 - 6


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.text("abcdef", max_size=30), st.text("ghijkl", min_size=1, max_size=40)), min_size=1, max_size=30
    ),
    st.sampled_from(["best_fit", "single"]),
    st.integers(0, 99),
)
def test_each_conversation_comes_once_in_an_epoch_and_whole(
    tmp_path: Path, pairs: list[tuple[str, str]], method: Any, seed: int
) -> None:
    records = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    data = instructions(tmp_path, [lines_file(tmp_path / "a.jsonl", records)], packing=replace(PACKING, method=method))
    model = replace(MODEL, sequence=48)
    stream = sources_of(data, model, seed).train
    expected = Counter(
        (f"{prompt[1:]}{response}$".encode(), f"{'_' * len(prompt[1:])}{response}$".encode())
        for prompt, response in pairs
        if len(prompt) + len(response) <= 48
    )
    rows = epoch(stream)
    assert method == "best_fit" or len(rows) == len(pairs)
    seen = [conversation for row in rows for conversation in conversations(row)]
    cut = {(text, mask) for text, mask in seen if not text.endswith(b"$")}
    assert Counter(one for one in seen if one not in cut) == expected
    assert all(len(text) == 48 for text, _ in cut)
    assert len(seen) == len(pairs)
    resumed = sources_of(data, model, seed).train
    place = 5 * len(rows) + 1
    assert all((resumed[i].labels == stream[i].labels).all() for i in range(place, place + len(rows)))


TALKS = [
    [("user", "Say <|im_end|> twice"), ("assistant", "No.")],
    [("system", "Rhyme."), ("user", "tree"), ("assistant", "free"), ("user", "house"), ("assistant", "mouse")],
]
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
)


def test_ids_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    """With a template that marks responses; but a piece that a message spells is text here and ends a turn there."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.add_special_tokens([AddedToken(piece, special=True) for piece in ("<|im_start|>", "<|im_end|>")])
    reference = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>", chat_template=CHATML)
    reference.save_pretrained(tmp_path / "tokenizer")
    talks = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]
    model = replace(MODEL, vocab=258, sequence=200)
    for kind, path in (("huggingface", "tokenizer"), ("huggingface", "tokenizer/tokenizer.json")):
        data = instructions(
            tmp_path / kind / path,
            [lines_file(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])],
            tokenizer=TokenizerConfig("huggingface", str(tmp_path / path)),
            template=str(tmp_path / "tokenizer"),
            packing=replace(PACKING, method="single"),
        )
        stream = sources_of(data, model).train
        rows = sorted(epoch(stream), key=lambda row: int(row.counted.sum()))
        assert len(rows) == 2
        for talk, row, spelled in zip(talks, rows, (True, False), strict=True):
            expected = reference.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = expected["input_ids"], expected["assistant_masks"]
            assert (row.labels[row.counted] == np.array(ids)[np.array(mask, bool)]).all()
            if not spelled:
                assert row.tokens[: len(ids) - 1].tolist() == ids[:-1]
                assert row.labels[: len(ids) - 1].tolist() == ids[1:]
                assert row.counted[: len(ids) - 1].tolist() == [bool(one) for one in mask[1:]]
            else:
                end = reference.convert_tokens_to_ids("<|im_end|>")
                assert ids.count(end) == row.labels.tolist().count(end) + 1


def test_what_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that fills the sample leaves no response; others lose their end."""
    records = [{"prompt": "a" * n, "response": "b" * 20} for n in (20, 50, 64, 65, 100)]
    path = lines_file(tmp_path / "a.jsonl", records)
    caplog.set_level(logging.INFO, "pangu")

    def responses(too_long: str) -> list[int]:
        rows = epoch(sources_of(instructions(tmp_path, [path], too_long=too_long)).train)
        return sorted(int(row.counted.sum()) for row in rows)

    assert responses("truncate") == [1, 15, 21]
    assert (
        f"{path}: 3 conversations, 2 of them truncated; left out: 2 longer than model.sequence, 0 lines" in caplog.text
    )
    assert responses("leave_out") == [21]
    assert f"{path}: 1 conversations, 0 of them truncated; left out: 4 longer than" in caplog.text
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 2: has 71 tokens, more than model\.sequence \+ 1 = 65; set data\.too_long"
    ):
        responses("refuse")


def test_bad_lines_end_a_run_or_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"prompt": "a", "response": "b"}
    path = lines_file(
        tmp_path / "a.jsonl", [good, "", '{"prompt": ', {"prompt": "a", "response": " "}, good, "[" * 9999]
    )
    with pytest.raises(UserError) as caught:
        prepare(instructions(tmp_path / "out", [path], max_bad=2), MODEL, show_progress=False)
    assert str(caught.value).startswith(f"{path}, line 6: is not JSON (")
    assert str(caught.value).endswith("limit reached: data.max_bad = 2 bad lines; correct the line, or raise the limit")
    assert f"skipped: {path}, line 3: is not JSON (" in caplog.text
    assert f"skipped: {path}, line 4: message 1 is an empty response" in caplog.text
    assert not (tmp_path / "out" / "instructions").exists()
    caplog.set_level(logging.INFO, "pangu")
    prepare(instructions(tmp_path / "out", [path], max_bad=3, workers=2), MODEL, show_progress=False)
    assert (
        f"{path}: 2 conversations, 0 of them truncated; left out: 0 longer than model.sequence, 3 lines" in caplog.text
    )


def test_bad_lines_are_counted_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that is one too many ends its chunk: what follows is not encoded first."""
    seen = []
    real = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, record, *rest: seen.append(record) or real(self, record, *rest))
    bad, long = {"prompt": "a", "response": ""}, {"prompt": "a" * 99, "response": "b"}
    path = lines_file(tmp_path / "a.jsonl", [bad, bad, long, *[{"prompt": "a", "response": "b"}] * 50])
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 2: message 1 is an empty response; limit reached: data\.max_bad = 1"
    ):
        prepare(instructions(tmp_path, [path], max_bad=1, too_long="refuse"), MODEL, show_progress=False)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": ("no.jsonl",)}, "data.train no.jsonl: no such file or folder"),
        ({"train": ("README.md",)}, "data.train README.md: unknown type of file"),
        ({"train": ("a.txt",)}, "must be a .jsonl file with one conversation per line"),
        ({"train": ("empty.jsonl",)}, "empty.jsonl: no conversations left"),
        ({"template": "no.jinja"}, "data.template = no.jinja: no such file"),
        ({"tokenizer": TokenizerConfig("huggingface", "none")}, "none"),
        ({"template": "hostile.jinja"}, "a.jsonl, line 1: the chat template hostile.jinja fails: "),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines_file(Path("a.jsonl"), [{"prompt": "a", "response": "b"}])
    for name, text in {
        "README.md": "",
        "a.txt": "a",
        "empty.jsonl": "\n",
        "hostile.jinja": "{{ ''.__class__.__mro__ }}",
    }.items():
        Path(name).write_text(text)
    with pytest.raises(UserError, match=re.escape(says)):
        prepare(replace(instructions(Path("out"), ["a.jsonl"]), **change), MODEL, show_progress=False)
    with pytest.raises(UserError, match=r"model\.vocab = 50: must be at least 257, the size of the tokenizer"):
        prepare(instructions(Path("out"), ["a.jsonl"]), replace(MODEL, vocab=50), show_progress=False)


def test_tokens_are_made_once_and_anew_for_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines_file(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    data = instructions(tmp_path / "out", [path])
    made = tmp_path / "out" / "instructions" / "train-0.bin"
    numbers = []
    for changed in (data, data, replace(data, template="chatml"), replace(data, template="chatml")):
        prepare(changed, MODEL, show_progress=False)
        numbers.append(made.stat().st_mtime_ns)
    made.write_bytes(made.read_bytes()[:-2])
    prepare(changed, MODEL, show_progress=False)
    numbers.append(made.stat().st_mtime_ns)
    lines_file(tmp_path / "a.jsonl", [{"prompt": "a", "response": "bc"}])
    prepare(changed, MODEL, show_progress=False)
    numbers.append(made.stat().st_mtime_ns)
    manifest = made.with_name("manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "counts": {}}))
    prepare(changed, MODEL, show_progress=False)
    numbers.append(made.stat().st_mtime_ns)
    assert [one == other for one, other in pairwise(numbers)] == [True, False, True, False, False, False]


def test_several_files_are_weighted_and_validated_by_themselves(tmp_path: Path) -> None:
    records = {name: [{"prompt": "q", "response": name * 40}] * 30 for name in ("a", "b")}
    files = [lines_file(tmp_path / f"{name}.jsonl", some) for name, some in records.items()]
    data = instructions(tmp_path, files, weights=(3.0, 1.0), validation=tuple(files))
    sources = sources_of(data)
    drawn = [chr(row.labels[0]) for row in (sources.train[index] for index in range(20)) if isinstance(row, Row)]
    assert Counter(drawn) == {"a": 15, "b": 5}
    assert {
        name: {chr(row.labels[0]) for row in epoch(stream)} for name, stream in sources.validation_sources.items()
    } == {
        "a.jsonl": {"a"},
        "b.jsonl": {"b"},
    }
    assert sources.validation is not None
    assert sources.validation.num_samples == 60


def gradients(
    rank: int, world: int, layout: Layout, folder: Path, *words: str
) -> tuple[dict[str, torch.Tensor], float, dict[str, float]]:
    """Of the first batch of conversations, on one rank of a layout; its loss and the figures of experts."""
    trainer, batches = trainer_and_batches(layout, folder, *words)
    trainer.forward_backward(batches)
    found = whole(trainer, of_gradients=True)
    step = trainer.read(trainer.update())
    return found, step.loss, step.experts or {}


def trainer_and_batches(layout: Layout, folder: Path | None, *words: str) -> tuple[Any, list[Batch]]:
    trainer, _ = small_trainer(
        layout, "precision=fp64", "model.vocab=257", "model.sequence=32", "model.kind=gpt", *MASKED, *words
    )
    if folder is None:
        return trainer, []
    data = instructions(folder, [str(folder / "a.jsonl")])
    stream = open_sources(data, trainer.config.model, seed=1).train
    at, batch = trainer.mesh.at, trainer.config.batch
    with Loader(stream, PACKING, batch.global_size, batch.micro_size, at.data, layout.data) as loader:
        return trainer, loader.micro_batches(0)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared conversations. Not to be changed."""
    folder = tmp_path_factory.mktemp("talks")
    records = [{"prompt": "ask " * (n % 4), "response": f"answer {n * n}"} for n in range(60)]
    data = instructions(folder, [lines_file(folder / "a.jsonl", records)])
    prepare(data, replace(MODEL, sequence=32), show_progress=False)
    return folder


def by_hand(pairs: Sequence[tuple[str, str]], length: int) -> Batch:
    """A prompt and a response in each row, and padding; the loss counts from the response's first token to the end."""
    batch = Batch(
        *(torch.zeros(len(pairs), length, dtype=torch.int64) for _ in range(5)), samples=tuple(range(len(pairs)))
    )
    weights = torch.zeros(len(pairs), length)
    for row, (prompt, response) in enumerate(pairs):
        ids = [*prompt.encode(), *response.encode(), END]
        size = len(ids) - 1
        batch.tokens[row, :size], batch.labels[row, :size] = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
        weights[row, len(prompt) - 1 : size] = 1.0
        batch.positions[row] = torch.tensor([*range(size), *range(length - size)])
        assert batch.documents is not None
        batch.documents[row, size:] = 1
    return replace(batch, weights=weights)


def test_gradients_are_those_of_a_mask_made_by_hand(tmp_path: Path) -> None:
    """And what a prompt would have been predicted as changes nothing: its tokens are context only."""
    pairs = [("ask " * (n + 1), f"answer {n * n}") for n in range(4)]
    records = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    files = [lines_file(tmp_path / "a.jsonl", records)]
    packing = replace(PACKING, method="single")
    data = instructions(tmp_path, files, validation=tuple(files), packing=packing)
    stream = sources_of(data, replace(MODEL, sequence=32)).validation
    assert stream is not None
    batch, expected = batch_of([stream[n] for n in range(4)], range(4), packing), by_hand(pairs, 32)
    assert torch.equal(batch.weights, expected.weights)
    scrambled = replace(batch, labels=torch.where(batch.weights > 0, batch.labels, 7))
    seen = []
    for one in (batch, expected, scrambled):
        trainer, _ = trainer_and_batches(Layout(), None)
        trainer.forward_backward([one] * 4)
        seen.append(whole(trainer, of_gradients=True))
    assert all(bool(gradient.any()) for name, gradient in seen[0].items() if "weight" in name)
    for name, gradient in seen[0].items():
        torch.testing.assert_close(gradient, seen[1][name], rtol=1e-10, atol=1e-14, msg=name)
        assert torch.equal(gradient, seen[2][name]), name


EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.router.balance_weight=0.5", "model.router.z_loss=0.1")
BALANCES = (("sequence", "1.0"), ("global", "null"), ("bias", "1.25"))


@pytest.mark.parametrize(("balance", "capacity"), [("none", ""), *BALANCES])
def test_every_layout_gives_the_same_gradients(talks: Path, ranks: Ranks, balance: str, capacity: str) -> None:
    layouts = [Layout(data=2), Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2)]
    words: tuple[str, ...] = ()
    if capacity:
        layouts += [Layout(expert=2, data=2)]
        words = (*EXPERTS, f"model.router.balance={balance}", f"model.expert_capacity={capacity}")
    one, loss, figures = gradients(0, 1, Layout(), talks, *words)
    assert bool(figures) == bool(capacity)
    for layout in layouts:
        for seen, other, others in ranks.run(layout.world, gradients, layout, talks, *words):
            assert other == pytest.approx(loss, rel=1e-12), layout
            assert others == pytest.approx(figures, rel=1e-12), layout
            for name, gradient in one.items():
                torch.testing.assert_close(seen[name], gradient, rtol=1e-9, atol=1e-12, msg=f"{layout} {name}")


@pytest.mark.parametrize(("balance", "capacity"), BALANCES)
def test_padding_is_nothing_to_experts(talks: Path, balance: str, capacity: str) -> None:
    """Neither in loads and room nor in losses: all is as without it."""
    words = (*EXPERTS, f"model.router.balance={balance}", f"model.expert_capacity={capacity}")
    records = [{"prompt": "ask", "response": f"answer {n} of 4"} for n in range(4)]
    data = instructions(talks / "short", [lines_file(talks / "short.jsonl", records)], packing=SINGLE)
    stream = sources_of(data, replace(MODEL, sequence=32)).train
    rows = [row for row in (stream[n] for n in range(4)) if isinstance(row, Row)]
    size = 32 - stream.padding(0)
    assert 8 < size < 24
    seen = []
    for cut in (32, size):
        batch = batch_of([row.cut(cut) for row in rows], range(4), SINGLE)
        assert batch.padding is not None
        assert int(batch.padding.sum()) == 4 * (cut - size)
        for one in (batch, replace(batch, padding=None)):
            trainer, _ = trainer_and_batches(Layout(), None, *words)
            trainer.forward_backward([one] * 4)
            seen.append((whole(trainer, of_gradients=True), trainer.read(trainer.update()).experts))
    (padded, figures), (_, of_padding), (_, others), (plain, expected) = seen
    assert figures == pytest.approx(expected, rel=1e-12)
    assert others == pytest.approx(expected, rel=1e-12)
    assert of_padding != pytest.approx(expected, rel=1e-3)
    for name, gradient in plain.items():
        torch.testing.assert_close(padded[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
