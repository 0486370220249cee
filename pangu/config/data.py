"""The configuration of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Filename, Natural, NotNegative, Positive, Share


@dataclass(frozen=True)
class PackingConfig:
    """Rules for turning tokens into samples and masks, as in PanGu-α's data pipeline."""

    eod: Natural | None
    """Id of the end-of-document token. null: the tokenizer's own with data=stream and data=instructions; otherwise,
    there is none."""
    pad: Natural | None
    """Id of the padding token. A position whose *input* is this id does not count in the loss; null: there is none."""
    reset_mask: bool
    """Mask attention across document ends."""
    reset_positions: bool
    """Restart position ids at 0 after the end of a document."""
    # younger than the first run folders, whose config.yaml lacks it
    stop: tuple[Natural, ...] = ()
    """Ids that end generated text in addition to `eod`, e.g. a chat model's end of turn; training treats them as
    ordinary tokens."""
    method: Literal["concat", "best_fit", "single"] = "concat"
    """`concat`: documents are concatenated and cut every `model.sequence` tokens; `best_fit`: full documents are packed
    together so that samples are nearly full (Ding et al. 2024), and a document is cut only if it is longer than a
    sample; `single`: one document per sample. The rest of a sample is padding, which is masked in loss and attention.
    The last two start each document with `bos`, or else with `eod`, which predicts its first token. data=stream packs
    a million tokens at a time."""
    index: Filename | None = None
    """Cache folder for packing indexes (which documents share a sample); null: next to the tokens."""
    bos: Natural | Literal["auto"] | None = None
    """Id of the token before each text: in streams, conversations, packed documents, prompts and evaluation. `auto`:
    the one that the tokenizer adds, if any; null: none. It is the same as `--bos` of tools/preprocess_data.py."""


Encoding = Literal["r50k_base", "p50k_base", "cl100k_base", "o200k_base"]
"""Encodings of tiktoken."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer, which turns text into ids."""

    kind: Literal["sentencepiece", "pangu", "huggingface", "gpt2", Encoding, "bytes"]
    """`sentencepiece`: the model file unchanged; `pangu`: jieba, then SentencePiece, as PanGu-α's corpus was made;
    `huggingface`: a local folder that transformers' AutoTokenizer loads, or a tokenizer.json; `gpt2`: a folder with
    vocab.json and merges.txt; `r50k_base` to `o200k_base`: a .tiktoken file with that encoding; `bytes`: UTF-8 bytes,
    and 256 as the end of a document."""
    path: str = ""
    """Path of the file or folder; empty for `bytes`."""


@dataclass(frozen=True)
class StdlibData:
    """Sources and docstrings of the Python standard library: real text that every machine has."""

    kind: Literal["stdlib"]
    """Selects the data source."""
    folder: Filename
    """Cache folder for the text, the SentencePiece model (trained with `model.vocab` pieces) and the indexed files."""
    validation_fraction: Annotated[float, Bounds(above=0, below=1)]
    """Fraction of the documents held out, chosen by a hash of their names."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class ScheduledWeights:
    """Mixing weights that replace earlier ones from some sample on."""

    sample: Count
    """First sample drawn with these weights, counted from 0; a step takes `batch.global_size` samples."""
    weights: tuple[NotNegative, ...]
    """Weight of each prefix of `data.train`; 0: nothing is drawn from it. Each prefix continues where it left off."""


@dataclass(frozen=True)
class IndexedData:
    """Indexed token files (`PREFIX.bin` and `PREFIX.idx`, Megatron's format), as tools/preprocess_data.py writes."""

    kind: Literal["indexed"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Prefixes, e.g. [/data/web, /data/books]."""
    weights: tuple[NotNegative, ...] | None
    """Mixing weight of each prefix of `train`. null: in proportion to their tokens."""
    validation: tuple[Filename, ...]
    """Prefixes of held-out data, read in proportion to their tokens; may be empty if `validation.every` is 0."""
    tokenizer: TokenizerConfig | None
    """Tokenizer for text sampled from the model; null: no samples."""
    packing: PackingConfig
    """Documents, masks and padding."""
    weight_schedule: tuple[ScheduledWeights, ...] = ()
    """Weights that apply from a later sample on, e.g. [{sample: 100000, weights: [0.5, 0.5]}]. A resumed run may append
    entries, and prefixes whose weight was 0 so far: samples already drawn do not change."""


@dataclass(frozen=True)
class StreamData:
    """Text that is tokenized, shuffled and packed while it is read, without preprocessing."""

    kind: Literal["stream"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Files, folders, globs, URLs that fsspec opens, hf:NAME[:CONFIGURATION[:SPLIT]], mds:FOLDER or wds:SHARDS:
    everything that `tools/preprocess_data.py --input` reads."""
    weights: tuple[Positive, ...] | None
    """Mixing weight of each entry of `train`. null: all of `train` is one source."""
    validation: tuple[Filename, ...]
    """Held-out text, given like `train`; its first `validation.sequences` samples are read at the start."""
    holdout: Share
    """Fraction of the documents of `train`, chosen by a hash of their text, that is held out instead."""
    text_key: Filename
    """Record field that holds the text."""
    shuffle: Natural
    """Size of the shuffle buffer in tokens: at most this many later tokens may overtake a document. The buffer is kept
    in memory (4 bytes per token) and read again on resume. 0: documents come in order."""
    max_bad: Natural
    """Number of lines per epoch that may be skipped because they hold no document; each is logged."""
    workers: Count
    """Tokenizer processes per rank, and per source if there are `weights`; 1: the loader's own thread."""
    tokenizer: TokenizerConfig | None
    """Tokenizer, which turns text into ids; null is for dry runs only."""
    packing: PackingConfig
    """Documents, masks and padding. `eod` ends each document; null: the tokenizer's own, without masks."""
    whole_files: bool = False
    """Treat each .txt file as one document, of at most 64 MiB; false: blank lines end documents."""


@dataclass(frozen=True)
class SyntheticData:
    """Random tokens from a counter-based generator, for measuring speed; there is nothing to learn."""

    kind: Literal["synthetic"]
    """Selects the data source."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class InstructionsData:
    """Conversations to fine-tune on: the loss counts only the assistant's messages and the token that ends each."""

    kind: Literal["instructions"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Files with one JSON object per line (.jsonl, may be compressed), folders or globs of them."""
    weights: tuple[NotNegative, ...] | None
    """Mixing weight of each entry of `train`. null: in proportion to their tokens."""
    validation: tuple[Filename, ...]
    """Held-out conversations, given like `train`; may be empty if `validation.every` is 0."""
    folder: Filename
    """Cache folder for the tokens."""
    tokenizer: TokenizerConfig | None
    """Tokenizer, which turns text into ids; required."""
    template: Filename
    """Chat template: `plain` (the texts unchanged, an end-of-document token after each response), `chatml`, `alpaca`,
    `llama3`, `qwen3`, or the path of a Jinja template: a file, a tokenizer_config.json or its folder."""
    messages_key: Filename
    """Field with a list of messages, each with a `role` (system, user, assistant, tool) and text as its `content`
    (OpenAI's format), or `from` and `value` (ShareGPT's); `conversations` is read, too."""
    prompt_key: Filename
    """Field with the user's message, in records without a message list."""
    response_key: Filename
    """Field with the assistant's response, in records without a message list."""
    too_long: Literal["truncate", "leave_out", "refuse"]
    """Rule for conversations longer than `model.sequence` tokens. `truncate`: cut the end off, and skip a conversation
    that then has no response; `leave_out`: skip it; `refuse`: end the run with an error. The log says how many were cut
    and skipped."""
    max_bad: Natural
    """Number of lines without a conversation that are skipped and counted; one more ends the run with an error."""
    workers: Count
    """Tokenizer processes in the first run, which fills the cache."""
    packing: PackingConfig
    """Masks and padding; `method` is best_fit or single."""
    turns: Literal["all", "last"] = "all"
    """Responses that count in the loss: `all`, or those after the `last` user message, for templates that omit the
    reasoning of earlier turns."""


DataConfig = StdlibData | IndexedData | StreamData | InstructionsData | SyntheticData
"""Data source."""
