"""Text generation: prompts in, continuations out, sampled token by token."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.reduce import all_reduce, gather_objects
from pangu.common.errors import UserError
from pangu.data.batch import Batch
from pangu.data.tokenizers import Tokenizer
from pangu.evaluation.inference import LoadedModel
from pangu.layers.attention import KVCache
from pangu.schedule.schedule import forward_only
from pangu.topology.random import generator, random_key

UNFINISHED = "\ufffd"
"""Decoding of an incomplete character, whose last bytes are in the next token."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Raises UserError for invalid values."""

    max_tokens: int
    """Largest number of generated tokens; a text also ends where it fills the model's window, `model.sequence`."""
    temperature: float = 1.0
    """Softmax temperature; 0: always the most probable token."""
    top_k: int = 0
    """Sample among the k most probable tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the fewest tokens, of those that `top_k` leaves, whose probabilities reach this sum (Holtzman et al.
    2020, section 3.1)."""
    repetition_penalty: float = 1.0
    """Divisor of positive scores, and factor of negative ones, of tokens that already occur in prompt or text (Keskar
    et al. 2019, section 4.1). 1: no penalty."""
    seed: int = 0
    """Seed; a sample is a function of the seed, the prompt's ids and the index of the token."""
    stop: tuple[int, ...] = ()
    """Ids that end a text, besides the model's end of document."""
    end: str = ""
    """Text that ends a text and is not part of it, where no id does."""

    def __post_init__(self) -> None:
        """Raise UserError for invalid values."""
        rules = {
            "max_tokens": (self.max_tokens >= 1, "must be at least 1"),
            "temperature": (self.temperature >= 0, "must be at least 0"),
            "top_k": (self.top_k >= 0, "must be at least 0, which samples from all tokens"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "must be above 0; 1 is no penalty"),
        }
        broken = [f"{key} = {getattr(self, key)}: {rule}" for key, (holds, rule) in rules.items() if not holds]
        if broken:
            raise UserError("\n".join(broken))


def draw(
    model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, ended: Container[int] = ()
) -> Iterator[tuple[int, int]]:
    """Continue each prompt, independently of the others, and yield (number of the prompt, id) of each new token.

    All ranks of a replica call this together, with the same prompts. Ids are yielded as soon as they are sampled,
    without the one that ends the text. The caller may add numbers of prompts that need no more tokens to `ended`.
    Raises UserError, naming the prompts that are empty, longer than the window or hold ids beyond the vocabulary.
    """
    window, vocab, problems = model.config.sequence, model.config.vocab, []
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= window:
            problems.append(f"prompt {number}: {len(prompt)} tokens; use 1 to model.sequence = {window}")
        if any(not 0 <= token < vocab for token in prompt):
            problems.append(f"prompt {number}: contains ids outside of model.vocab = {vocab}")
    if problems:
        raise UserError("\n".join(problems))
    # similar lengths side by side, which takes the least padding
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), model.rows):
        numbers = order[start : start + model.rows]
        rows = [prompts[number] for number in numbers]
        for row, token in _draw_rows(model, rows, sampling, numbers, ended):
            yield numbers[row], token


def _draw_rows(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    numbers: Sequence[int],
    ended: Container[int],
) -> Iterator[tuple[int, int]]:
    """Continue prompts in one batch; yield the row and the id of each new token."""
    ends = {model.eod, *model.stop, *sampling.stop}
    # the last token that the window has room for asks for one more
    room = [min(sampling.max_tokens, model.config.sequence + 1 - len(prompt)) for prompt in prompts]
    keys = [random_key(sampling.seed, "sample", *prompt) for prompt in prompts]
    reader = Reader(model, [len(prompt) for prompt in prompts], max(room))
    device = model.mesh.device
    used = torch.zeros(len(prompts), model.config.vocab, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        used[row, list(prompt)] = True
    tokens = torch.tensor([[0] * (reader.longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    step = 0
    while any(room):
        scores = reader.read(tokens)
        chances = torch.tensor([generator(key, step).random() for key in keys], dtype=torch.float64, device=device)
        ids = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        if scores is not None:
            ids = pick(scores, used, chances, sampling)
        tokens = all_reduce(ids, model.mesh.group("pipeline"))[:, None]
        used.scatter_(1, tokens, True)
        for row, token in enumerate(tokens[:, 0].tolist()):
            if room[row] and token in ends:
                room[row] = 0
            elif room[row]:
                room[row] -= 1
                yield row, token
                if numbers[row] in ended:
                    room[row] = 0
        step += 1


def generate(model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """Return the ids that `draw` yields for each prompt."""
    texts: list[list[int]] = [[] for _ in prompts]
    for number, token in draw(model, prompts, sampling):
        texts[number].append(token)
    return texts


def generate_shared(model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """Return the ids for each prompt; all ranks of all replicas call this together, and all get all texts."""
    mesh = model.mesh
    # with sharded weights or spread experts (in training) replicas compute in step: each draws everything
    replicas = 1 if mesh.layout.zero == 3 or mesh.layout.expert > 1 else mesh.layout.replicas
    texts = generate(model, prompts[mesh.replica % replicas :: replicas], sampling)
    replica_texts = gather_objects(texts, mesh.group("replicas"))
    return [replica_texts[number % replicas][number // replicas] for number in range(len(prompts))]


class Reader:
    """Incremental forward pass over a growing batch of texts, each token once.

    Texts end together: shorter ones begin later, after padding, which is a document of its own. So distances between
    the tokens of a text are those between their places, whatever else is in the batch.
    """

    def __init__(self, model: LoadedModel, lengths: Sequence[int], more: int) -> None:
        """Allocate the cache for texts of `lengths` tokens and up to `more` further ones."""
        self.longest = max(lengths)
        self._model = model
        # sequence parallelism deals tokens to ranks: what they do not divide is filled up behind the text, where a
        # causal model does not look, and what the cache has of that is replaced by the next token
        self._slices = model.runner.region.num_slices
        self._cache = KVCache(self.longest + more + self._slices)
        self._begins = torch.tensor([self.longest - length for length in lengths], device=model.mesh.device)[:, None]
        self._forward = forward_only(model.schedule, 1)
        self._read = 0
        """Number of tokens read, padding before shorter texts included."""

    def read(self, tokens: Tensor) -> Tensor | None:
        """Read the next tokens of each text, int64 [texts, tokens].

        Returns logits [texts, vocab] for the token after the last one, in fp32 (fp64 in fp64), on the ranks that hold
        the head; None on the others.
        """
        # Texts "a b c" and "d", of which "d" is padded in front; three tokens are read, then one more of each:
        #   places      0  1  2 | 3        positions  0  1  2 | 3        documents  1  1  1 | 1
        #              -2 -1  0 | 1                   0  0  0 | 1                   0  0  1 | 1
        # Padding is document 0, which the attention mask parts from the text.
        last = tokens.shape[1] - 1
        tokens = F.pad(tokens, (0, -tokens.shape[1] % self._slices))
        places = torch.arange(self._read + tokens.shape[1], device=tokens.device) - self._begins
        positions = places[:, self._read :].clamp(0, self._model.config.sequence - 1)
        documents = (places >= 0).long()
        batch = Batch(tokens, tokens, torch.zeros_like(tokens, dtype=torch.float32), positions, documents, ())
        self._read += last + 1
        runner = self._model.runner

        def scores(hidden: Tensor, _: Batch) -> Tensor:
            logits = runner.model.logits_of(hidden, slice(last, last + 1))[0]
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        return next(iter(runner.forward(self._forward, [batch], scores, self._cache)), None)


def pick(scores: Tensor, used: Tensor, chances: Tensor, sampling: Sampling) -> Tensor:
    """Return one id for each text, int64 [texts], from its scores [texts, vocab].

    `used`: bool [texts, vocab], the tokens that a text has already; `chances`: fp64 [texts] in [0, 1), the place in the
    cumulative distribution, most probable token first, that is sampled.
    """
    scores, penalty = scores.double(), sampling.repetition_penalty
    scores = torch.where(used, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.temperature == 0:
        return scores.argmax(-1)
    # With sorted probabilities .5 .3 .2 and top_p = .7 the first two remain: those before which less than .7 stands
    # (0, .5). Their running totals .5 .8 are searched for chance x .8, so that nothing need be divided again.
    ordered, ids = (scores / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    # on the host: running totals of a GPU may differ from run to run
    probabilities, chances = ordered[:, : sampling.top_k or None].softmax(-1).cpu(), chances.cpu()
    before = probabilities.cumsum(-1) - probabilities
    totals = probabilities.masked_fill(before >= sampling.top_p, 0.0).cumsum(-1)
    places = torch.searchsorted(totals, chances[:, None] * totals[:, -1:], right=True)
    # scores that are not finite have no place
    return ids.gather(1, places.clamp(max=totals.shape[1] - 1).to(ids.device))[:, 0]


@dataclass(frozen=True)
class Continuation:
    """Text generated after a prompt."""

    prompt: str
    """Prompt as the model saw it: a tokenizer may know fewer characters than the user typed."""
    text: str
    tokens: int
    """Number of tokens of the text."""
    end: str
    """Reason for the end: `stop`: end of a document; `length`: requested number of tokens; `window`: the model has no
    more room."""


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, eod: int | None, window: int, bos: int | None = None
) -> list[list[int]]:
    """Return the ids of prompts, each after `bos`, if given; without it an empty prompt follows the end of a document.

    Raises UserError, naming the prompts that are longer than the model's window, or are not text.
    """
    # bytes of a command line that are not UTF-8 are lone surrogates to Python
    if wrong := [text for text in texts if any("\ud800" <= character <= "\udfff" for character in text)]:
        raise UserError("\n".join(f"prompt {text[:40]!a}: contains bytes that are not UTF-8" for text in wrong))
    before = [] if bos is None else [bos]
    prompts = [[*before, *tokenizer.encode(text)] or [eod or 0] for text in texts]
    require_fitting([repr(text[:40]) for text in texts], prompts, window)
    return prompts


def require_fitting(names: Sequence[str], prompts: Sequence[Sequence[int]], window: int) -> None:
    """Raise UserError, naming the prompts that are longer than the model's window."""
    problems = [
        f"prompt {name}: {len(ids)} tokens, more than model.sequence = {window}; shorten it"
        for name, ids in zip(names, prompts, strict=True)
        if len(ids) > window
    ]
    if problems:
        raise UserError("\n".join(problems))


def text_ids(ids: Sequence[int], bos: int | None) -> Sequence[int]:
    """Return the ids without the one that begins a text."""
    return ids[1:] if bos is not None and ids[:1] == [bos] else ids


def continue_prompts(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Continuation]:
    """Continue prompts of `encode_prompts`. All ranks of a replica call this together.

    `on_text` is called with the number of a prompt and the text that is new since the last call, whole characters only.
    Raises UserError like `draw`.
    """
    assert model.tokenizer is not None
    tokenizer = model.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(text_ids(ids, model.bos))

    ids = [list(prompt) for prompt in prompts]
    ended: set[int] = set()
    begins = [len(decode(prompt)) for prompt in prompts]
    shown = list(begins)

    def show(number: int, text: str) -> None:
        if on_text is not None and len(text) > shown[number]:
            on_text(number, text[shown[number] :])
            shown[number] = len(text)

    def read(number: int) -> str:
        """Return the text, up to `sampling.end`."""
        text = decode(ids[number])
        place = text.find(sampling.end, begins[number]) if sampling.end else -1
        if place >= 0:
            ended.add(number)
        return text if place < 0 else text[:place]

    for number, token in draw(model, prompts, sampling, ended):
        ids[number].append(token)
        if on_text is not None or sampling.end:
            text = read(number).rstrip(UNFINISHED)
            # the end of a text must not be shown before it is whole
            held = max((n for n in range(len(sampling.end)) if text.endswith(sampling.end[:n])), default=0)
            show(number, text[: len(text) - held])
    results = []
    for number, text in enumerate(map(read, range(len(ids)))):
        show(number, text)
        length, room = len(ids[number]) - len(prompts[number]), model.config.sequence + 1 - len(prompts[number])
        end = "length" if sampling.max_tokens <= room else "window"
        if length < min(sampling.max_tokens, room) or number in ended:
            end = "stop"
        results.append(Continuation(text[: begins[number]], text[begins[number] :], length, end))
    return results
