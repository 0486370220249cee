"""From JSON lines to tokens: text per second of processor time, beside a plain loop, `datasets.map` and megatron-core.

    python -m benchmarks.preprocess --output benchmarks/results/preprocess.json

Every contender is a process of its own, measured with all of its children: user and system time, which other work of
the machine hardly changes. Each reads a small file and a large one, and what it took for the small one, starting, is
subtracted. `plain` encodes line by line and keeps nothing. megatron-core's preprocessing is its builder of
indexed files in such a loop; it is measured if it can be imported (see `benchmarks.tensor_parallel`).

The English text is Python's standard library; the Chinese one is drawn from jieba's dictionary by frequency, with some
characters and English words between.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pangu.config.data import PackingConfig, StreamData, TokenizerConfig
from pangu.data.packed_source import PackedSource, StreamRecipe
from pangu.data.tokenizers import SPACE, encode, load_tokenizer
from pangu.prepare.vocabulary import train_sentencepiece
from tools.preprocess_data import main as preprocess

SMALL = 200_000
"""Bytes of text, about."""


def english(size: int) -> list[str]:
    """Pieces of the standard library's sources."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        texts += [source[begin : begin + 4000] for begin in range(0, len(source), 4000)]
    return list(_cut(itertools.cycle(texts), size))


def chinese(size: int) -> list[str]:
    """Words by their frequency, in sentences of 4 to 24."""
    import jieba

    counts, _ = jieba.Tokenizer.gen_pfdict(jieba.Tokenizer().get_dict_file())
    words = [word for word in counts if counts[word]]
    weights = list(itertools.accumulate(counts[word] for word in words))
    draw = random.Random(0)

    def sentence() -> str:
        text = "".join(draw.choices(words, cum_weights=weights, k=draw.randrange(4, 25)))
        rare = "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(2)) if draw.random() < 0.3 else ""
        return text + draw.choice(["", "", "", "", " GPT-3 model ", "2023年"]) + rare + draw.choice("，。，。！？\n")

    texts = ("".join(sentence() for _ in range(draw.randrange(3, 40))) for _ in itertools.count())
    return list(_cut(texts, size))


def _cut(texts: Any, size: int) -> Any:
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


def plain(kind: str, model: str, text: str, _: str) -> None:
    """Encode text by a few lines of Python. For PanGu-α, jieba as its authors call it."""
    tokenizer: Any = load_tokenizer(TokenizerConfig("sentencepiece", model))
    if kind == "pangu":
        import jieba

        words = jieba.Tokenizer()
        words.FREQ, words.total = words.gen_pfdict(words.get_dict_file())
        words.initialized = True
    with open(text, encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            document = json.loads(line)["text"]
            if kind == "pangu":
                document = " ".join(word.replace(" ", SPACE).replace("\n", "▃") for word in words.cut(document))
            tokenizer.processor.encode(document)


def ours(workers: int) -> Callable[[str, str, str, str], None]:
    """tools/preprocess_data.py."""

    def run(kind: str, model: str, text: str, output: str) -> None:
        words = ["--tokenizer", kind, "--tokenizer-path", model, "--workers", str(workers), "--overwrite"]
        assert preprocess(["--input", text, "--output", output, *words]) == 0

    return run


def streamed(workers: int) -> Callable[[str, str, str, str], None]:
    """`data=stream`: the same text as the samples of an epoch, shuffled and packed."""

    def run(kind: str, model: str, text: str, _: str) -> None:
        tokenizer = TokenizerConfig(kind, model)
        packing = PackingConfig(None, None, reset_mask=False, reset_positions=False)
        sizes = {"holdout": 0.0, "shuffle": 2_000_000, "max_bad": 0, "workers": workers}
        texts = {"train": (text,), "validation": (), "weights": None, "text_key": "text"}
        data = StreamData("stream", tokenizer=tokenizer, packing=packing, **texts, **sizes)
        encoder = partial(encode, tokenizer=tokenizer, vocab=load_tokenizer(tokenizer).vocab_size, eod=9)
        source = PackedSource(StreamRecipe((text,), data, False, encoder, 1024, 1, data.shuffle, (0,)))
        source.begin(None)
        while not source.epoch:
            source.take()
        source.close()

    return run


def datasets_map(kind: str, model: str, text: str, output: str) -> None:
    """`datasets.map` over batches, in one process, with the same tokenizer."""
    import datasets

    tokenizer = load_tokenizer(TokenizerConfig(kind, model))
    rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=output)
    rows.map(lambda batch: {"ids": [tokenizer.encode(text) for text in batch["text"]]}, batched=True)


def megatron(kind: str, model: str, text: str, output: str) -> None:
    """megatron-core's builder, fed line by line as its tool does, with the same tokenizer."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = load_tokenizer(TokenizerConfig(kind, model))
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
    with open(text, encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            ids = tokenizer.encode(json.loads(line)["text"])
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(f"{output}.idx")


CONTENDERS: dict[str, Callable[[str, str, str, str], None]] = {
    "plain": plain,
    "pangu": ours(1),
    "pangu, 2 workers": ours(2),
    "stream": streamed(1),
    "stream, 2 workers": streamed(2),
    "datasets.map": datasets_map,
    "megatron-core": megatron,
}


def seconds(name: str, *words: str) -> float | None:
    """Processor time of a contender and its children; None if it cannot run here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, "-m", "benchmarks.preprocess", "--run", name, *words]
    done = subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent if done.returncode == 0 else None


def measure(
    kind: str, model: str, folder: Path, texts: Callable[[int], list[str]], large: int, rounds: int
) -> dict[str, Any]:
    """Megabytes per second of processor time, the median of the rounds, and the median ratio to `plain` in one."""
    sizes, files = [], []
    for size in (SMALL, large):
        documents = texts(size)
        files.append(folder / f"{kind}-{size}.jsonl")
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
        files[-1].write_text("\n".join(lines), encoding="utf-8")
        sizes.append(sum(len(text.encode()) for text in documents))
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in CONTENDERS:
            output = str(folder / f"{kind}-{CONTENDERS[name].__name__}-{number}")
            spent = [seconds(name, kind, model, str(file), f"{output}-{file.stem}") for file in files]
            if spent[0] is not None and spent[1] is not None:
                rates.setdefault(name, []).append((sizes[1] - sizes[0]) / (spent[1] - spent[0]) / 1e6)
                print(kind, name, f"{rates[name][-1]:.3f} MB/s", flush=True)
    return {
        name: {
            "megabytes_per_cpu_second": statistics.median(found),
            "of_plain": statistics.median(a / b for a, b in zip(found, rates["plain"], strict=True)),
            "rounds": found,
        }
        for name, found in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", help="PanGu-α's vocab.model (else one that is trained here)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        CONTENDERS[options.run[0]](*options.run[1:])
        return
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "english.model").write_bytes(train_sentencepiece(english(1_000_000), 8000, "bpe"))
        model = options.model or str(folder / "chinese.model")
        if not options.model:
            Path(model).write_bytes(train_sentencepiece(chinese(1_000_000), 12_000, "unigram", jieba=True))
        english_model = str(folder / "english.model")
        for kind, path, texts, large in (
            ("sentencepiece", english_model, english, 16_000_000),
            ("pangu", model, chinese, 4_000_000),
        ):
            found[kind] = measure(kind, path, folder, texts, large, options.rounds)
    text = json.dumps({"command": sys.argv[1:], "python": sys.version.split()[0], "results": found}, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
