"""tools/preprocess_data.py as its users start it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pangu.config.data import TokenizerConfig
from pangu.data.indexed import open_indexed
from pangu.data.tokenizers import load_tokenizer
from pangu.data.vocabulary import train_sentencepiece
from tests.documents import document_lengths
from tests.end_to_end.commands import called, kill_all, wait_until, workers
from tests.spawn import repository

DOCUMENTS = [f"document {number}\nof number {number * 37}" for number in range(300)]


def tool(*arguments: object, name: str = "preprocess_data") -> subprocess.CompletedProcess[str]:
    """Run one of the tools."""
    return called(f"tools/{name}", *arguments)


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
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["corpus.bin", "corpus.idx"]


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


def test_a_kill_leaves_no_file_and_no_process(folder: Path, tmp_path: Path) -> None:
    """SIGKILL while the workers wait for more text, which comes through a pipe that nobody closes."""
    pipe, output = tmp_path / "endless.txt", tmp_path / "out"
    os.mkfifo(pipe)
    given = ["--input", pipe, "--tokenizer", "sentencepiece", "--tokenizer-path", folder / "tokenizer.model"]
    line = [sys.executable, "tools/preprocess_data.py", *given, "--output", output / "c", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(repository())}
    with subprocess.Popen(line, cwd=repository(), env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            with pipe.open("w") as text:
                text.write("\n\n".join(["a b c d e " * 100] * 1000))
                text.flush()
                wait_until(lambda: len(workers(process)) >= 3, 60)  # and the tracker of their semaphores
                started = workers(process)
                process.kill()
                process.wait()
                wait_until(lambda: not any(map(runs, started)), 60)
        finally:
            kill_all(process)
    assert not list(output.iterdir())


def test_overwriting_must_be_asked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.idx").write_text("precious")
    done = preprocess(folder, tmp_path / "c")
    assert done.returncode == 2
    assert f"{tmp_path / 'c.idx'} exist already" in done.stderr
    assert (tmp_path / "c.idx").read_text() == "precious"
    assert preprocess(folder, tmp_path / "c", "--overwrite").returncode == 0
    assert texts(tmp_path / "c", folder) == DOCUMENTS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "/nowhere"], "--input /nowhere: no such file or folder"),
        (["--input", "{tmp}/blank.txt"], "there is no text in it"),
        (["--input", "{tmp}/blank.txt", "--workers", "2"], "there is no text in it"),
        (["--input", "{tmp}/gbk.txt"], "gbk.txt is not UTF-8"),
        (["--input", "{tmp}/gbk.txt", "--workers", "2"], "gbk.txt is not UTF-8"),
        (["--tokenizer-path", "/nowhere"], "/nowhere does not exist"),
        (["--eod", "40000"], "--eod 40000 is outside the tokenizer's vocabulary of 320 ids"),
        (["--holdout", "0.0001"], "--holdout 0.0001 leaves one side without a document"),
        (["--output", "/dev/null/c"], "cannot write /dev/null/c"),
        (["--output", "/dev/full/c"], "cannot write /dev/full/c"),
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
    expected = {"text.txt", "tokenizer.model", *(["corpus.bin", "corpus.idx"] if name == "preprocess_data" else [])}
    assert {path.name for path in tmp_path.iterdir()} == expected
