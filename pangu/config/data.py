"""The configuration of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Filename, Natural, NotNegative, Positive, Share


@dataclass(frozen=True)
class PackingConfig:
    """How tokens become samples and masks. The rules are those of PanGu-α's data pipeline."""

    eod: Natural | None
    """Id that ends a document. null: the tokenizer's own (data=stream, data=instructions), or the data has none."""
    pad: Natural | None
    """Id of padding. A position whose *input* is this id does not count in the loss; null where there is none."""
    reset_mask: bool
    """Tokens do not attend across the end of a document."""
    reset_positions: bool
    """Position ids restart at 0 after the end of a document."""
    # younger than the first run folders, whose config.yaml lacks it
    stop: tuple[Natural, ...] = ()
    """Ids that end a generated text beside `eod`, e.g. a chat model's end of turn; in samples they are as any other."""
    method: Literal["concat", "best_fit", "single"] = "concat"
    """`concat`: all documents in a row, cut every `model.sequence` tokens; `best_fit`: whole documents together in
    samples, so that they are nearly full (Ding et al. 2024), a document being cut only if it is longer than a sample;
    `single`: one document in a sample. What is left of a sample is padding, which neither counts nor is attended to.
    The last two begin each document behind `bos`, or behind `eod` without one, which predicts its first token;
    data=stream has only `concat`."""
    index: Filename | None = None
    """Folder of the indexes that say which documents share a sample, which are made once; null: beside the tokens."""
    bos: Natural | Literal["auto"] | None = None
    """Id before each text: in streams, conversations, packed documents, prompts and what is evaluated. `auto`: the one
    that the tokenizer puts there, if any; null: none. tools/preprocess_data.py has the same as `--bos`."""


Encoding = Literal["r50k_base", "p50k_base", "cl100k_base", "o200k_base"]
"""tiktoken's."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Turns text into ids."""

    kind: Literal["sentencepiece", "pangu", "huggingface", "gpt2", Encoding, "bytes"]
    """`sentencepiece`: the model file as it is; `pangu`: jieba, then SentencePiece, as PanGu-α's corpus was made;
    `huggingface`: a local folder that transformers' AutoTokenizer loads, or a tokenizer.json; `gpt2`: a folder with
    vocab.json and merges.txt; `r50k_base` to `o200k_base`: a .tiktoken file with that encoding; `bytes`: those of
    UTF-8, and 256 as the end of a document."""
    path: str = ""
    """The file or the folder; `bytes` has none."""


@dataclass(frozen=True)
class StdlibData:
    """The sources and docstrings of the Python standard library: real text that is on every machine."""

    kind: Literal["stdlib"]
    """Selects the data source."""
    folder: Filename
    """Where the text, the SentencePiece model and the indexed files are cached. The model is trained with
    `model.vocab` pieces."""
    validation_fraction: Annotated[float, Bounds(above=0, below=1)]
    """Share of the documents held out, chosen by a hash of their names."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class LaterWeights:
    """A blend that takes over from another one."""

    sample: Count
    """Number of the first sample that is drawn so: samples are counted from 0, `batch.global_size` of them a step."""
    weights: tuple[NotNegative, ...]
    """One for each prefix of `data.train`; 0: nothing of it is drawn. Each prefix goes on where it was."""


@dataclass(frozen=True)
class IndexedData:
    """Indexed token files (`PREFIX.bin` and `PREFIX.idx`, Megatron's format), as tools/preprocess_data.py writes."""

    kind: Literal["indexed"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Prefixes, e.g. [/data/web, /data/books]."""
    weights: tuple[NotNegative, ...] | None
    """One for each prefix of `train`: samples are drawn in proportion to them. null: in proportion to their tokens."""
    validation: tuple[Filename, ...]
    """Prefixes of held-out data, read in proportion to their tokens; may be empty if `validation.every` is 0."""
    tokenizer: TokenizerConfig | None
    """Used to sample text from the model; null samples nothing."""
    packing: PackingConfig
    """Documents, masks and padding."""
    later_weights: tuple[LaterWeights, ...] = ()
    """Weights from some sample on, e.g. [{sample: 100000, weights: [0.5, 0.5]}]. A resumed run may get more of them,
    and prefixes that had the weight 0: what was drawn before stays what it was."""


@dataclass(frozen=True)
class StreamData:
    """Text that is encoded, shuffled and packed while it is read, without a preparation."""

    kind: Literal["stream"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Files, folders, globs, URLs of these that fsspec opens, or hf:NAME[:CONFIGURATION[:SPLIT]]: all that
    `tools/preprocess_data.py --input` reads."""
    weights: tuple[Positive, ...] | None
    """One for each of `train`: samples are drawn in proportion to them. null: all of `train` is one source."""
    validation: tuple[Filename, ...]
    """Held-out text, as `train`, whose first `validation.sequences` samples are read at the start."""
    holdout: Share
    """Share of the documents of `train`, chosen by a hash of their text, that is held out instead."""
    text_key: Filename
    """Field of a record with its text."""
    shuffle: Natural
    """Tokens of the text after it that a document lets pass at most, which are in memory (4 bytes each) and are read
    again when a run is resumed. 0: documents come in order."""
    max_bad: Natural
    """Lines of an epoch that may be left out because they hold no document; each is named."""
    workers: Count
    """Processes that encode for each rank, and for each source if there are `weights`; 1: its loader's thread does."""
    tokenizer: TokenizerConfig | None
    """Turns text into ids; null: for a dry run."""
    packing: PackingConfig
    """Documents, masks and padding. `eod` ends each document; null: the tokenizer's own, without masks."""
    whole_files: bool = False
    """Each .txt file is one document, of at most 64 MiB; false: blank lines end documents."""


@dataclass(frozen=True)
class SyntheticData:
    """Tokens drawn from a counter-based generator: for measuring speed, nothing can be learned from them."""

    kind: Literal["synthetic"]
    """Selects the data source."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class InstructionsData:
    """Conversations to fine-tune on: the loss counts at what the assistant says, and at what ends it."""

    kind: Literal["instructions"]
    """Selects the data source."""
    train: tuple[Filename, ...]
    """Files of one JSON object in each line (.jsonl, also packed), folders or globs of them."""
    weights: tuple[NotNegative, ...] | None
    """One for each of `train`: samples are drawn in proportion to them. null: in proportion to their tokens."""
    validation: tuple[Filename, ...]
    """The same of held-out conversations; may be empty if `validation.every` is 0."""
    folder: Filename
    """Where their tokens are cached."""
    tokenizer: TokenizerConfig | None
    """Must be given."""
    template: Filename
    """How a conversation becomes text: `plain` (texts as they are, the end of a document behind each response),
    `chatml`, `alpaca`, `llama3`, `qwen3`, or the path of a Jinja template: a file, a tokenizer_config.json or its
    folder."""
    messages_key: Filename
    """Field with a list of messages, each with a `role` (system, user, assistant, tool) and a text as its `content`, as
    OpenAI writes them, or with `from` and `value`, as ShareGPT does; `conversations` is read too."""
    prompt_key: Filename
    """Where there are no messages: field with what the user says."""
    response_key: Filename
    """Field with what the assistant answers."""
    too_long: Literal["truncate", "leave_out", "refuse"]
    """Of conversations of more than `model.sequence` tokens. `truncate`: their end is cut off, and those without a
    response then are left out; `refuse`: the run ends with an error. The log counts what was cut or left out."""
    max_bad: Natural
    """Lines without a conversation that are left out and counted; the run ends with an error at one more."""
    workers: Count
    """Processes that encode, the first time."""
    packing: PackingConfig
    """Masks and padding; `method` is best_fit or single."""
    turns: Literal["all", "last"] = "all"
    """Responses that the loss counts: `all` of a conversation, or those after the `last` message of the user, as for
    templates that leave the reasoning out of earlier ones."""


DataConfig = StdlibData | IndexedData | StreamData | InstructionsData | SyntheticData
"""A source of data."""
