"""The ids that end a document and begin a text, as the tokenizers of published models have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
import yaml

from pangu.config.data import PackingConfig, StreamData, TokenizerConfig
from pangu.data.boundaries import describe_ids
from pangu.data.indexed import open_indexed
from pangu.data.packing import PackedDocuments, Packing, write_packing
from pangu.data.sources import with_ids
from pangu.data.tokenizers import Tokenizer, encode, load_tokenizer
from pangu.prepare.instructions import Encoder
from pangu.prepare.sandbox import Allowance
from tests.configs import tiny
from tests.prepare.test_instructions import instructions
from tools import inspect_data, preprocess_data

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


class Published(NamedTuple):
    """What the files of a published tokenizer say."""

    special: str
    config: dict[str, Any]
    before: str | None = None
    """Piece that the post-processor puts before a text."""
    ordinary: str = ""


PUBLISHED = {
    "llama 2": Published("<unk> <s> </s>", {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
    "llama 3": Published(
        "<|begin_of_text|> <|end_of_text|> <|eom_id|> <|eot_id|>",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "<|begin_of_text|>",
    ),
    "gemma 3": Published(
        "<pad> <eos> <bos> <start_of_turn> <end_of_turn>",
        {"bos_token": {"__type": "AddedToken", "content": "<bos>"}, "eos_token": "<eos>"},
        "<bos>",
        ordinary="</s> <b>",
    ),
    "qwen 3": Published("<|endoftext|> <|im_start|> <|im_end|>", {"bos_token": None, "eos_token": "<|im_end|>"}),
    "gpt-oss": Published(
        "<|startoftext|> <|endoftext|> <|return|> <|end|> <|call|>",
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    ),
    "deepseek": Published(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <|EOT|>",
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        "<｜begin▁of▁sentence｜>",
    ),
    "command": Published(
        "<BOS_TOKEN> <EOS_TOKEN> <|END_OF_TURN_TOKEN|>",
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        "<BOS_TOKEN>",
    ),
    "turns alone": Published("<|im_start|> <|im_end|>", {"eos_token": "<|im_end|>"}),
    "ordinary pieces": Published("<pad>", {}, ordinary="</s> <eos>"),
}
ENDS = {
    "llama 2": "</s>",
    "llama 3": "<|end_of_text|>",
    "gemma 3": "<eos>",
    "qwen 3": "<|endoftext|>",
    "gpt-oss": "<|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "command": "<EOS_TOKEN>",
    "turns alone": None,
    "ordinary pieces": None,
}


def write_folder(folder: Path, name: str) -> Path:
    """A folder of transformers with the pieces of a published tokenizer and one for each byte."""
    model, processors = PUBLISHED[name], tokenizers.processors
    special, ordinary = model.special.split(), model.ordinary.split()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*special, *ordinary, *alphabet])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(special)
    core.add_tokens([tokenizers.AddedToken(piece, special=False) for piece in ordinary])
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    if before := model.before:
        template = processors.TemplateProcessing(single=f"{before} $A", special_tokens=[(before, vocab[before])])
        core.post_processor = processors.Sequence([core.post_processor, template])
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **model.config}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def opened(path: Path) -> Tokenizer:
    return load_tokenizer(TokenizerConfig("huggingface", str(path)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_file_and_folder_agree_on_what_ends_a_document_and_begins_a_text(tmp_path: Path, name: str) -> None:
    """And with transformers on the ids of a text."""
    folder = write_folder(tmp_path / "folder", name)
    shutil.copy(folder / "tokenizer.json", tmp_path / "alone.json")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for path in (folder, folder / "tokenizer.json", tmp_path / "alone.json"):
        ours = opened(path)
        pieces = {token: piece for piece, token in ours.special.items()} | {None: None}
        assert (pieces[ours.eod], pieces[ours.bos]) == (ENDS[name], PUBLISHED[name].before)
        assert [*([] if ours.bos is None else [ours.bos]), *ours.encode("some text")] == theirs.encode("some text")


def test_an_explicit_add_bos_token_is_followed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "gpt-oss")
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **PUBLISHED["gpt-oss"].config, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    assert opened(folder).bos == opened(folder / "tokenizer.json").bos == 0


@pytest.fixture(scope="module")
def text() -> list[str]:
    return ["some words of a text", "a text of other words"] * 20


def sentencepiece_model(folder: Path, text: list[str], **options: Any) -> Tokenizer:
    prefix = str(folder / "tokenizer")
    size = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_prefix=prefix, **size, **options)
    return load_tokenizer(TokenizerConfig("sentencepiece", f"{prefix}.model"))


GEMMA = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 1)),
        ({**GEMMA, "user_defined_symbols": ["</s>", "<end_of_turn>"]}, (1, 2)),
        ({"bos_id": -1}, (2, None)),
        ({"eos_id": -1, "user_defined_symbols": ["</s>"]}, (None, 1)),
        ({"user_defined_symbols": ["<a>", "<b>", "<sep>", "<pad>", "<mask>", "<eod>", "<eot>"]}, (9, None)),
    ],
)
def test_a_sentencepiece_file_declares_its_ids(
    tmp_path: Path, text: list[str], options: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    """Llama's, Gemma's with its HTML tags, T5's, one without an end, and PanGu-α's, which wants no beginning."""
    tokenizer = sentencepiece_model(tmp_path, text, **options)
    assert (tokenizer.eod, tokenizer.bos) == expected


def test_a_sentencepiece_file_follows_the_configuration_beside_it(tmp_path: Path, text: list[str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert sentencepiece_model(tmp_path, text).bos is None


def test_the_key_overrides_the_tokenizer_in_streams(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama 3")
    words = (f"data.train=[{folder}]", f"data.tokenizer={{kind: huggingface, path: {folder}}}", "model.vocab=300")
    for more, expected in (
        ((), (1, 0)),
        (("data.packing.bos=null",), (1, None)),
        (("data.packing.eod=7", "data.packing.bos=8"), (7, 8)),
    ):
        data = with_ids(tiny("data=stream", "validation.every=0", *words, *more).data)
        assert isinstance(data, StreamData)
        assert (data.packing.eod, data.packing.bos) == expected


def test_documents_are_encoded_between_both_ids(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig("huggingface", str(write_folder(tmp_path / "folder", "llama 3")))
    ids, lengths = encode(["a", "", "bc"], tokenizer, 300, 1, 0)
    a, b, c = (load_tokenizer(tokenizer).encode(sign)[0] for sign in "abc")
    assert ids.tolist() == [0, a, 1, 0, 1, 0, b, c, 1]
    assert lengths.tolist() == [3, 2, 4]


@pytest.mark.parametrize(("more", "begins"), [([], [0]), (["--bos", "none"], []), (["--bos", "5", "--eod", "7"], [5])])
def test_preprocessing_takes_and_prints_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], begins: list[int]
) -> None:
    folder = write_folder(tmp_path / "folder", "llama 3")
    (tmp_path / "a.txt").write_text("ab\n")
    words = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert preprocess_data.main([*words, "--tokenizer", "huggingface", "--tokenizer-path", str(folder), *more]) == 0
    end = 7 if "--eod" in more else 1
    tokens = open_indexed(str(tmp_path / "out")).tokens.tolist()
    assert tokens == [*begins, *opened(folder).encode("ab"), end]
    printed = capsys.readouterr().out
    assert f"(id {end})" in printed
    assert "<|begin_of_text|> (id 0)" in printed or more


def test_packed_samples_are_shown_as_training_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The beginning of a text is the first input, with no end of another document before it."""
    folder = write_folder(tmp_path / "folder", "llama 3")
    (tmp_path / "a.txt").write_text("ab\n")
    words = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert preprocess_data.main([*words, "--tokenizer", "huggingface", "--tokenizer-path", str(folder)]) == 0
    assert inspect_data.main([str(tmp_path / "out"), "--packing", "best_fit", "--samples", "1", "--sequence", "4"]) == 0
    assert "loss at 3 of 4" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    manifest["recipe"]["bos"] = -3
    (tmp_path / "out.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert inspect_data.main([str(tmp_path / "out"), "--packing", "best_fit", "--samples", "1", "--sequence", "4"]) == 2
    assert "is not a manifest of these files" in capsys.readouterr().err


@pytest.mark.parametrize("documents", [[[0, 11, 12, 1], [0, 13, 1]], [[11, 12, 1], [13, 1]]])
def test_packed_documents_begin_with_it_once(tmp_path: Path, documents: list[list[int]]) -> None:
    """Whether the files hold it or not, it is the first input of each document and is not predicted."""
    from pangu.prepare.indexed_writer import IndexedWriter

    with IndexedWriter(tmp_path / "x", 100) as writer:
        for document in documents:
            writer.add(document)
    packing = Packing(str(tmp_path / "x"), 3, "best_fit", None, bos=0)
    write_packing(packing)
    rows = PackedDocuments(packing, 100, PackingConfig(1, None, True, True, bos=0))
    found = sorted((rows.row(number).tokens.tolist(), rows.row(number).labels.tolist()) for number in range(2))
    assert [row[0][: len(row[1])] for row in found] == [[0, 11, 12], [0, 13, 1]]
    assert found[0][1] == [11, 12, 1]
    assert found[1][1][:2] == [13, 1]


@pytest.mark.parametrize("template", ["plain", "chatml", "llama3", "file"])
def test_a_conversation_begins_with_it_once(tmp_path: Path, template: str) -> None:
    """A template of a file decides for itself."""
    folder = write_folder(tmp_path / "folder", "llama 3")
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    name = str(tmp_path / "t.jinja") if template == "file" else template
    tokenizer = TokenizerConfig("huggingface", str(folder))
    packing = PackingConfig(1, None, True, True, bos=0)
    encoder = Encoder(instructions(tmp_path, (), tokenizer=tokenizer, template=name, packing=packing), 100)
    with Allowance() as allowance:
        ids = encoder.encode({"prompt": "a", "response": "b"}, allowance).ids.tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_the_ids_are_told_with_their_pieces(tmp_path: Path) -> None:
    tokenizer = opened(write_folder(tmp_path / "folder", "llama 3"))
    assert describe_ids(tokenizer, 1, 0) == (
        "end of document <|end_of_text|> (id 1), beginning of text <|begin_of_text|> (id 0)"
    )
    assert describe_ids(None, 7, None) == "end of document id 7, beginning of text none"


def test_every_data_source_ships_the_key() -> None:
    for path in (Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"):
        packing = yaml.safe_load(path.read_text(encoding="utf-8"))["packing"]
        assert "bos" in packing or "defaults" in yaml.safe_load(path.read_text(encoding="utf-8"))
