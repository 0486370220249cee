"""tools/preprocess_data.py as its users start it."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pangu.config.data import TokenizerConfig
from pangu.data import inputs, tables
from pangu.data.indexed import open_indexed
from pangu.data.tokenizers import load_tokenizer
from pangu.prepare import preprocessing
from pangu.prepare.journal import Journal
from pangu.prepare.manifest import find_damage, read_manifest
from pangu.prepare.vocabulary import train_sentencepiece
from tests.documents import document_lengths
from tests.end_to_end.commands import call, called, kill_all, wait_until, workers
from tests.spawn import fork_server, repository

DOCUMENTS = [f"document {number}\nof number {number * 37}" for number in range(300)]
KINDS = ("bin", "idx", "json", "png")
"""Of the files of an output."""
SMALL_CHUNK = 1 << 15


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is interrupted between two of them."""
    monkeypatch.setattr(inputs, "CHUNK", SMALL_CHUNK)
    monkeypatch.setattr(tables, "CHUNK", SMALL_CHUNK)


def tool(*arguments: object, name: str = "preprocess_data") -> subprocess.CompletedProcess[str]:
    """Run one of the tools."""
    return called(f"tools/{name}", *arguments)


def call_quietly(name: str, words: list[str], path: list[str]) -> None:
    """Run one of the tools on a process of its own, in many small chunks."""
    sys.path[:] = path
    inputs.CHUNK = tables.CHUNK = SMALL_CHUNK
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    sys.exit(call(name, words))


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository."""
    environment = {**os.environ, "PYTHONPATH": str(repository())}
    bash = ["bash", "-ec", command]
    return subprocess.run(bash, cwd=repository(), env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file and a tokenizer. Not to be changed."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "text.txt").write_text("\n\n".join(DOCUMENTS))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(DOCUMENTS, 320, "bpe"))
    return folder


def texts(prefix: Path, folder: Path) -> list[str]:
    """The documents of an indexed file, which must each end with 9."""
    opened = open_indexed(prefix)
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(folder / "tokenizer.model")))
    parts = np.split(opened.tokens, np.cumsum(document_lengths(opened))[:-1])
    assert all(part[-1] == 9 for part in parts)
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def preprocess(folder: Path, output: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run with the tokenizer and text of `folder`, unless the arguments say otherwise."""
    given = ["--input", folder / "text.txt", "--tokenizer", "sentencepiece", "--tokenizer-path"]
    return tool(*given, folder / "tokenizer.model", "--output", output, "--workers", 1, *arguments)


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_come_back(folder: Path, tmp_path: Path, workers: int) -> None:
    done = preprocess(folder, tmp_path / "new" / "corpus", "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "new" / "corpus", folder) == DOCUMENTS
    tokens = len(open_indexed(tmp_path / "new" / "corpus").tokens)
    assert f"corpus: 300 documents, {tokens:,} tokens, {tokens / 300:.1f} per document" in done.stdout
    assert re.search(r"0\.01 MB of text in \d+\.\d s, \d+\.\d\d MB/s", done.stdout)
    assert "Encoding documents" in done.stderr
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"corpus.{kind}" for kind in KINDS}


def test_records_and_other_ends(folder: Path, tmp_path: Path) -> None:
    records = tmp_path / "in" / "a.jsonl"
    records.parent.mkdir()
    records.write_text("\n".join(json.dumps({"content": document}) for document in DOCUMENTS[:5]))
    inputs = ["--input", records.parent, "--text-key", "content"]
    assert preprocess(folder, tmp_path / "seven", *inputs, "--eod", 7).returncode == 0
    assert preprocess(folder, tmp_path / "bare", *inputs, "--no-append-eod").returncode == 0
    seven, bare = open_indexed(tmp_path / "seven"), open_indexed(tmp_path / "bare")
    assert (seven.tokens[np.cumsum(document_lengths(seven)) - 1] == 7).all()
    assert seven.tokens[seven.tokens != 7].tolist() == bare.tokens.tolist()


def test_bytes_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    words = ("--tokenizer", "bytes", "--workers", 1, "--output", tmp_path / "c")
    assert tool("--input", folder / "text.txt", *words).returncode == 0
    opened = open_indexed(tmp_path / "c")
    ends = b"".join([document.encode() + b"\n" for document in DOCUMENTS])
    assert np.where(opened.tokens == 256, ord("\n"), opened.tokens).astype(np.uint8).tobytes() == ends
    assert DOCUMENTS[0].replace("\n", "\\n") in tool(tmp_path / "c", name="inspect_data").stdout


def test_holdout(folder: Path, tmp_path: Path) -> None:
    done = preprocess(folder, tmp_path / "c", "--holdout", 0.2)
    assert done.returncode == 0, done.stderr
    train, validation = texts(tmp_path / "c", folder), texts(tmp_path / "c-validation", folder)
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert 0.1 < len(validation) / len(DOCUMENTS) < 0.3
    # The same document falls on the same side whatever else is in the input.
    fewer = tmp_path / "fewer.txt"
    fewer.write_text("\n\n".join(DOCUMENTS[::2]))
    assert preprocess(folder, tmp_path / "f", "--holdout", 0.2, "--input", fewer).returncode == 0
    assert texts(tmp_path / "f-validation", folder) == [d for d in validation if d in DOCUMENTS[::2]]


def test_a_write_that_fails_half_way(folder: Path, tmp_path: Path) -> None:
    """The shell allows files of 1 KiB; the tokens take more."""
    given = f"--input {folder}/text.txt --tokenizer sentencepiece --tokenizer-path {folder}/tokenizer.model --workers 1"
    command = f"ulimit -f 1; {sys.executable} -B tools/preprocess_data.py {given} --output {tmp_path}/c"
    done = shell(command)
    assert done.returncode == 2
    assert f"cannot write {tmp_path}/c: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def runs(pid: int) -> bool:
    """Whether a process is there and not only its number, for nobody to ask after."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state != "" and not state.startswith("Z")


def test_a_kill_leaves_no_process_and_nothing_under_the_names(folder: Path, tmp_path: Path) -> None:
    """SIGKILL while the workers wait for more text, which comes through a pipe that nobody closes."""
    pipe, output = tmp_path / "endless.txt", tmp_path / "out"
    os.mkfifo(pipe)
    given = ["--input", pipe, "--tokenizer", "sentencepiece", "--tokenizer-path", folder / "tokenizer.model"]
    line = [sys.executable, "tools/preprocess_data.py", *given, "--output", output / "c", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(repository())}
    with subprocess.Popen(line, cwd=repository(), env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            with pipe.open("w") as text:
                text.write("\n\n".join(["a b c d e " * 100] * 3000))
                text.flush()
                wait_until(lambda: len(workers(process)) >= 3)  # and the tracker of their semaphores
                started = workers(process)
                process.kill()
                process.wait()
                wait_until(lambda: not any(map(runs, started)))
        finally:
            kill_all(process)
    assert [path.name for path in output.iterdir()] == ["c.partial"]


def everything(folder: Path) -> dict[str, bytes]:
    """Contents of all files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def large(folder: Path, number: int) -> Path:
    """Lines of JSON, packed, with duplicates, bad lines and several chunks."""
    texts = [f"document {place % 97} of {place}: " + "words of it " * (place % 50) for place in range(number)]
    lines = [json.dumps({"text": texts[place // 3 if place % 5 == 0 else place]}) for place in range(number)]
    lines[7] = lines[number - 3] = "{"
    path = folder / "large.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    return path


def test_killed_at_any_time_it_comes_to_the_same_files(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGKILL at random moments, then the same command. `--kills=25` is the long form."""
    draw = random.Random(0)
    path = large(tmp_path, 3_000)
    given = ["--input", path, "--tokenizer", "sentencepiece", "--tokenizer-path", folder / "tokenizer.model"]
    given += ["--holdout", "0.1", "--max-bad", "2", "--remove-duplicates"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert tool(*given, "--output", tmp_path / "one" / "c", "--workers", 1).returncode == 0
    kills, left = request.config.getoption("--kills"), 200
    while kills and left:
        left -= 1
        line = [*map(str, given), "--output", str(tmp_path / "two" / "c"), "--workers", "1", "--commit-every", "0"]
        process = fork_server().Process(target=call_quietly, args=("tools/preprocess_data", line, sys.path))
        process.start()
        process.join(draw.uniform(0, 1))
        kills -= process.is_alive()
        process.kill()
        process.join()
        if (tmp_path / "two" / "c.json").exists() and not (tmp_path / "two" / "c.partial").exists():
            for file in (tmp_path / "two").iterdir():
                file.unlink()
    assert not kills
    done = tool(*given, "--output", tmp_path / "two" / "c", "--workers", 2, "--commit-every", 0)
    assert done.returncode == 0, done.stderr
    assert everything(tmp_path / "two") == everything(tmp_path / "one")


def test_a_kill_at_the_very_end_loses_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While what was needed to go on is removed: the files have their names, and no later command takes them away."""

    def killed(partial: Path) -> None:
        (partial / "c.lengths").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(preprocessing, "remove", killed)
        assert preprocess(folder, tmp_path / "c").returncode != 0
    assert "already exist" in preprocess(folder, tmp_path / "c").stderr
    assert texts(tmp_path / "c", folder) == DOCUMENTS


def test_a_kill_between_the_names_leaves_nothing_beside_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the index has its name it lies among the unfinished files, with which it goes."""
    found: list[list[str]] = []

    def replace(old: Path, new: Path) -> None:
        old.rename(new)
        found.append(sorted(path.name for path in (tmp_path / "out").iterdir()))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        assert preprocess(folder, tmp_path / "out" / "c").returncode == 0
    assert found[0] == ["c.bin", "c.partial"]


@pytest.mark.usefixtures("small_chunks")
def test_a_command_goes_on_where_an_error_has_ended_it(folder: Path, tmp_path: Path) -> None:
    path = large(tmp_path, 3_000)
    (tmp_path / "out").mkdir()
    words = ("--input", path, "--commit-every", 0)
    done = preprocess(folder, tmp_path / "out" / "c", *words, "--max-bad", 1)
    assert done.returncode == 2
    assert "large.jsonl.gz, line 2998: is not JSON" in done.stderr
    assert "limit reached: --max-bad 1 bad lines" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.partial"]
    other = preprocess(folder, tmp_path / "out" / "c", *words, "--max-bad", 2, "--eod", 7)
    assert other.returncode == 2
    assert "was started with other inputs or options (eod)" in other.stderr
    done = preprocess(folder, tmp_path / "out" / "c", *words, "--max-bad", 2)
    assert done.returncode == 0, done.stderr
    assert "continuing after" in done.stderr
    assert "left out: 2 bad lines" in done.stdout
    manifest = json.loads((tmp_path / "out" / "c.json").read_text())
    assert manifest["statistics"]["documents"] == 2_998
    assert manifest["statistics"]["bad_lines"]["count"] == 2
    assert manifest["statistics"]["bad_lines"]["first"][0].startswith(f"{path}, line 8: is not JSON")


@pytest.mark.usefixtures("small_chunks")
def test_another_command_with_overwrite_begins_anew(folder: Path, tmp_path: Path) -> None:
    path = large(tmp_path, 3_000)
    words = ("--input", path, "--commit-every", 0, "--max-bad")
    assert preprocess(folder, tmp_path / "c", *words, 1).returncode == 2
    done = preprocess(folder, tmp_path / "c", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "c", folder) == DOCUMENTS
    assert not (tmp_path / "c.partial").exists()


def test_a_line_that_is_too_long_counts_as_a_bad_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "CHUNK", 100)
    monkeypatch.setattr(tables, "CHUNK", 100)
    monkeypatch.setattr(inputs, "LONGEST", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "a" * 5000, "two")))
    words = ("--input", path, "--workers", 1, "--max-bad")
    done = preprocess(folder, tmp_path / "c", *words, 0)
    assert done.returncode == 2
    assert (
        f"{path}, line 2: it does not end within 0 MiB; split it into documents; limit reached: --max-bad 0"
        in done.stderr
    )
    done = preprocess(folder, tmp_path / "c", *words, 1)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "c", folder) == ["one", "two"]
    assert "left out: 1 bad lines" in done.stdout


def test_two_commands_do_not_write_the_same_files(folder: Path, tmp_path: Path) -> None:
    with closing(Journal(made(tmp_path / "c.partial") / "journal.sqlite")):
        done = preprocess(folder, tmp_path / "c")
    assert done.returncode == 2
    assert (
        "journal.sqlite: cannot be used (database is locked); make sure that no other command writes there"
        in done.stderr
    )


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_duplicates_are_left_out(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "twice.txt"
    text.write_text("\n\n".join([*DOCUMENTS[:5], DOCUMENTS[2], "new", DOCUMENTS[0], DOCUMENTS[2]]))
    done = preprocess(folder, tmp_path / "c", "--input", text, "--remove-duplicates")
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "c", folder) == [*DOCUMENTS[:5], "new"]
    assert "left out: 3 duplicates" in done.stdout


def test_near_duplicates_are_left_out(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    one, two = (" ".join(f"{word}{number}" for number in range(300)) for word in "ab")
    near = one.replace("a150", "A  150").replace("a7 ", "x7 ")
    text = tmp_path / "near.txt"
    text.write_text("\n\n".join([one, "short", two, near, two]))
    done = preprocess(
        folder, tmp_path / "c", "--input", text, "--remove-near-duplicates", 0.7, "--remove-duplicates", "--workers", 2
    )
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "c", folder) == [one, "short", two]
    assert "left out: 1 duplicates\nleft out: 1 near duplicates" in done.stdout


def test_near_duplicates_without_the_library(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    done = preprocess(folder, tmp_path / "c", "--remove-near-duplicates", 0.8)
    assert done.returncode == 2
    assert "needs the package rensa; pip install rensa" in done.stderr


def test_what_belongs_to_the_files(folder: Path, tmp_path: Path) -> None:
    """Statistics, and checksums of which a test finds what is wrong."""
    assert preprocess(folder, tmp_path / "c").returncode == 0
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    lengths = document_lengths(open_indexed(tmp_path / "c"))
    found = manifest["statistics"]
    assert (found["documents"], found["tokens"]) == (300, lengths.sum())
    assert found["bytes"] == sum(len(document.encode()) for document in DOCUMENTS)
    assert found["bytes_per_token"] == found["bytes"] / found["tokens"]
    assert (found["lengths"]["shortest"], found["lengths"]["longest"]) == (lengths.min(), lengths.max())
    for name, share in (("median", 50), ("p90", 90), ("p99", 99)):
        assert found["lengths"][name] == np.percentile(lengths, share, method="inverted_cdf")
    assert sum(found["histogram"].values()) == 300
    assert find_damage(tmp_path / "c", manifest) == []
    content = bytearray((tmp_path / "c.bin").read_bytes())
    content[7] ^= 1
    (tmp_path / "c.bin").write_bytes(content)
    (tmp_path / "c.idx").unlink()
    assert find_damage(tmp_path / "c", manifest) == [
        f"{tmp_path}/c.bin: damaged within 64 MiB from byte 0",
        f"{tmp_path}/c.idx: is missing",
    ]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("damage", ["lost", "garbage"])
def test_what_was_begun_and_is_damaged(folder: Path, tmp_path: Path, damage: str) -> None:
    path = large(tmp_path, 3_000)
    words = ("--input", path, "--commit-every", 0, "--max-bad")
    assert preprocess(folder, tmp_path / "c", *words, 1).returncode == 2
    partial = tmp_path / "c.partial"
    if damage == "lost":
        (partial / "c.tokens").write_bytes(b"")
    else:
        (partial / "journal.sqlite").write_bytes(b"no journal" * 999)
    done = preprocess(folder, tmp_path / "c", *words, 2)
    assert done.returncode == 2
    assert f"remove {partial} to start over" in done.stderr
    assert "Traceback" not in done.stderr


def test_overwriting_must_be_asked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.idx").write_text("precious")
    done = preprocess(folder, tmp_path / "c")
    assert done.returncode == 2
    assert f"{tmp_path / 'c.idx'} already exist" in done.stderr
    assert (tmp_path / "c.idx").read_text() == "precious"
    assert preprocess(folder, tmp_path / "c", "--overwrite").returncode == 0
    assert texts(tmp_path / "c", folder) == DOCUMENTS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "/nowhere"], "--input /nowhere: no such file or folder"),
        (["--input", "{tmp}/blank.txt"], "has no text"),
        (["--input", "{tmp}/blank.txt", "--workers", "2"], "has no text"),
        (["--input", "{tmp}/gbk.txt"], "gbk.txt, line 1: is not UTF-8"),
        (["--input", "{tmp}/gbk.txt", "--workers", "2"], "gbk.txt, line 1: is not UTF-8"),
        (["--tokenizer-path", "/nowhere"], "/nowhere: does not exist"),
        (["--eod", "40000"], "--eod 40000 is outside the tokenizer's vocabulary of 320 ids"),
        (["--holdout", "0.0001"], "--holdout 0.0001 leaves one split without a document"),
        (["--output", "/dev/null/c"], "cannot write /dev/null/c"),
        (["--output", "/dev/full/c"], "cannot write /dev/full/c"),
        (["--output", ""], "--output '': must end with the name that the files begin with"),
        (["--output", "{tmp}/"], "must end with the name that the files begin with"),
        (["--tokenizer", "bytes"], "--tokenizer bytes needs no --tokenizer-path"),
        (["--tokenizer-path", ""], "--tokenizer sentencepiece needs a --tokenizer-path"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--holdout", "1"], "--holdout 1.0: must be at least 0 and less than 1"),
    ],
)
def test_bad_input_is_one_message(folder: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n\n")
    (tmp_path / "gbk.txt").write_bytes("你好".encode("gb18030"))
    done = preprocess(folder, tmp_path / "c", *[argument.format(tmp=tmp_path) for argument in arguments])
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.txt", "gbk.txt"]


@pytest.mark.parametrize("name", ["preprocess_data", "train_tokenizer"])
def test_the_example_of_the_help_works(tmp_path: Path, name: str) -> None:
    done = tool("--help", name=name)
    assert done.returncode == 0
    example = (
        done.stdout.split("example:\n")[1].replace("/tmp/", f"{tmp_path}/").replace("python ", f"{sys.executable} ")
    )
    ran = shell(example)
    assert ran.returncode == 0, ran.stderr
    expected = {
        "text.txt",
        "tokenizer.model",
        *([f"corpus.{kind}" for kind in KINDS] if name == "preprocess_data" else []),
    }
    assert {path.name for path in tmp_path.iterdir()} == expected
