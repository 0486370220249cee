"""tools/inspect_data.py as its users start it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pangu.prepare.corpora import prepare
from pangu.prepare.indexed_writer import IndexedWriter
from tests.configs import config
from tests.prepare.test_preprocess_data import DOCUMENTS, folder, preprocess, tool  # noqa: F401


@pytest.fixture(scope="module")
def corpus(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A prefix with a manifest. Not to be changed."""
    prefix = tmp_path_factory.mktemp("inspected") / "corpus"
    assert preprocess(folder, prefix).returncode == 0
    return prefix


def test_documents_as_text(corpus: Path) -> None:
    done = tool(corpus, "--verify", name="inspect_data")
    assert done.returncode == 0, done.stderr
    assert f"{corpus}: all checksums match" in done.stdout
    assert f"{corpus}: 300 documents, " in done.stdout
    assert f"document 0: {DOCUMENTS[0]}".replace("\n", "\\n") in done.stdout
    assert done.stdout.count("  document ") == 2


def test_samples_as_a_model_gets_them(tmp_path: Path) -> None:
    """Cut after each end of a document, where positions begin anew; the loss does not count at padding, 1."""
    datasets = {"a": [[5, 6, 9], [7, 1, 9], [5, 9], [8] * 30], "b": [[2] * 20, [3] * 20]}
    for name, documents in datasets.items():
        with IndexedWriter(tmp_path / name, 10) as writer:
            for document in documents:
                writer.add(document)
        (tmp_path / name).mkdir()  # of whatever; the files are meant
    words = ("--weights", 3, 1, "--samples", 12, "--sequence", 8, "--eod", 9, "--pad", 1, "--reset-positions")
    done = tool(tmp_path / "a", tmp_path / "b", *words, "--reset-mask", name="inspect_data")
    assert done.returncode == 0, done.stderr
    drawn = []
    for sample in re.split("^sample ", done.stdout, flags=re.MULTILINE)[1:]:
        name, start, loss = re.findall(r"/(a|b) from token (\d+), loss at (\d) of 8", sample)[0]
        drawn.append(name)
        tokens = [token for document in datasets[name] for token in document][int(start) :][:8]
        parts = re.findall(r"tokens (\d)-(\d), positions 0-(\d), document (\d)(?:, loss at (\d))?: \[(.*)\]", sample)
        assert [int(token) for part in parts for token in part[-1].split(", ")] == tokens
        assert int(loss) == 8 - tokens.count(1)
        for number, (begin, stop, position, document, counted, ids) in enumerate(parts):
            assert (int(position), int(document)) == (int(stop) - int(begin), number)
            assert ids.count("9") == (number < len(parts) - 1 or tokens[-1] == 9)
            assert (counted == "") == (ids.count("1") == 0)
    assert drawn.count("b") == 3


def test_damage_is_named(corpus: Path, tmp_path: Path) -> None:
    for kind in ("bin", "idx", "json"):
        (tmp_path / f"corpus.{kind}").write_bytes(Path(f"{corpus}.{kind}").read_bytes())
    content = bytearray((tmp_path / "corpus.bin").read_bytes())
    content[100] ^= 4
    (tmp_path / "corpus.bin").write_bytes(content)
    done = tool(tmp_path / "corpus", "--verify", name="inspect_data")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path}/corpus.bin: damaged within 64 MiB from byte 0" in done.stderr
    (tmp_path / "corpus.json").unlink()
    done = tool(tmp_path / "corpus", "--verify", name="inspect_data")
    assert done.returncode == 2
    assert "leave out --verify" in done.stderr


def test_packed_samples(tmp_path: Path) -> None:
    """Whole documents behind an end, 9, and the padding behind them; no index is left beside the tokens."""
    with IndexedWriter(tmp_path / "a", 10) as writer:
        for document in ([5, 6, 9], [7, 1, 9], [4, 9], [8] * 9 + [9]):
            writer.add(document)
    words = ("--packing", "best_fit", "--samples", 3, "--sequence", 7, "--eod", 9, "--reset-mask", "--reset-positions")
    done = tool(tmp_path / "a", *words, name="inspect_data")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    samples = re.split("^sample ", done.stdout, flags=re.MULTILINE)[1:]
    by_loss = {
        re.findall(r"packed from (\d), loss at (\d) of 7, (\d) of padding", sample)[0]: sample for sample in samples
    }
    assert sum(int(loss) for _, loss, _ in by_loss) == 18
    for (pieces, loss, padding), sample in by_loss.items():
        assert len(re.findall(r"tokens \d-\d, positions 0-\d, document \d: \[", sample)) == int(pieces)
        assert (f"tokens {loss}-6: padding" in sample) == (padding != "0")
    assert "positions 0-2, document 0: [9, 5, 6]" in done.stdout or "document 1: [9, 5, 6]" in done.stdout


def test_conversations(tmp_path: Path) -> None:
    """The text of each, and what of it is a response."""
    records = [{"prompt": "Say hello: ", "response": "hello"}, {"prompt": "Now bye: ", "response": "bye"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    files = (f"data.train=[{tmp_path}/a.jsonl]", "data.tokenizer={kind:bytes}", f"data.folder={tmp_path}/data")
    chosen = config("data=instructions", *files, "data.template=plain", "model.vocab=257", "model.sequence=40")
    prepare(chosen.data, chosen.model, show_progress=False)
    done = tool(tmp_path / "data" / "instructions", "--samples", 1, name="inspect_data")
    assert done.returncode == 0, done.stderr
    assert "packed from 2, loss at 10 of 40, 12 of padding" in done.stdout
    assert "loss at 6: Say hello: hello" in done.stdout
    assert re.search(r"  loss at \d+-\d+, of: hello\n", done.stdout)
    assert re.search(r"  loss at \d+-\d+, of: bye\n", done.stdout)
    assert "tokens 28-39: padding" in done.stdout
    (tmp_path / "data" / "instructions" / "manifest.json").unlink()
    done = tool(tmp_path / "data" / "instructions", name="inspect_data")
    assert (done.returncode, "prepared conversations are missing" in done.stderr) == (2, True)
    assert re.search(rf"; to see its token files, give {tmp_path}/data/instructions/train\S*\n", done.stderr)
    (tmp_path / "data" / "train.idx").touch()
    assert f"; to see its token files, give {tmp_path}/data/train\n" in tool(tmp_path, name="inspect_data").stderr
