"""Ids drawn from a model: a cache changes nothing, nor do the texts beside a text."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.config.attention import obstacles
from pangu.config.model import LatentConfig, ModelConfig
from pangu.evaluation.generation import Reader, Sampling, draw, generate, pick
from pangu.evaluation.inference import LoadedModel
from pangu.layers.attention import AttentionCore, KVCache
from pangu.layers.kernels import QKV
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Runner
from pangu.schedule.schedule import make_schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from tests.models.helpers import TINY, make, variant
from tests.models.test_variants import VARIANTS
from tests.weights import whole_logits

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13], [1, 2, 4]]


def loaded(config: ModelConfig = TINY, kernel: str = "sdpa", eod: int | None = None, rows: int = 8) -> LoadedModel:
    """A model in fp64 on one process."""
    model, _ = make(config, kernel, seed=5)
    runner = Runner(model, {0: ModelPart.full(model.config)}, 0, "rank 0", None, torch.float64, TensorRank())
    return LoadedModel(runner, make_schedule("1f1b", 1, 1, 1), Mesh(Layout(), 0, CPU), config, None, eod, rows)


def scores_of(model: LoadedModel, text: list[int]) -> Tensor:
    """[vocab], of the token after a text, computed from all its tokens at once."""
    tokens = torch.tensor([text])
    with torch.no_grad():
        return whole_logits(model.runner.model, tokens, torch.arange(len(text))[None])[-1, 0]


def cases() -> list[Any]:
    """Kind, kernel and changes of every variant, with each kernel that generation may meet on a CPU."""
    return [
        (kind, kernel, changes)
        for kind, kernel, changes in itertools.product(("gpt", "pangu"), ("reference", "sdpa"), [{}, *VARIANTS])
        if not any(obstacles(kernel, variant(**{"kind": kind} | changes), "fp64", "cpu"))
    ]


@pytest.mark.parametrize(("kind", "kernel", "changes"), cases(), ids=str)
def test_with_a_cache_every_variant_computes_what_it_does_without(
    kind: str, kernel: str, changes: dict[str, object]
) -> None:
    """Texts of different lengths side by side, token by token up to the window; fp64, 1e-12."""
    model = loaded(variant(**{"kind": kind} | changes), kernel)
    lengths, window = (1, 9, 4), TINY.sequence
    source = torch.Generator().manual_seed(2)
    texts = torch.randint(0, TINY.vocab, (3, window), generator=source).tolist()
    reader = Reader(model, lengths, window - max(lengths))
    rows = [[0] * (max(lengths) - length) + text[:length] for text, length in zip(texts, lengths, strict=True)]
    tokens = torch.tensor(rows)
    for more in range(window - max(lengths) + 1):
        found = reader.read(tokens)
        assert found is not None
        expected = torch.stack([scores_of(model, t[: n + more]) for t, n in zip(texts, lengths, strict=True)])
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        tokens = torch.tensor([[text[min(n + more, window - 1)]] for text, n in zip(texts, lengths, strict=True)])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2, "positions": "relative", "window": 5}], ids=str)
def test_a_kernel_that_wants_as_many_queries_as_keys_reads_the_prompts_only(changes: dict[str, object]) -> None:
    model = variant(layers=1, **changes)
    texts = [generate(loaded(model, kernel), PROMPTS, Sampling(9, 0.0)) for kernel in ("flex", "sdpa")]
    assert texts[0] == texts[1]


def test_a_text_ends_at_each_id_that_ends_one() -> None:
    """The end of documents, and those of `data.packing.stop` beside it."""
    (text,) = generate(loaded(eod=66), [[1, 2, 3]], Sampling(12, seed=3))
    assert len(set(text)) > 4
    stop = tuple(dict.fromkeys(text[3:5]))
    (cut,) = generate(replace(loaded(eod=66), stop=stop), [[1, 2, 3]], Sampling(12, seed=3))
    assert cut == text[: min(text.index(token) for token in stop)]


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_latent_attention_keeps_the_latent_vectors_alone(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is read with keys of every head; after it, all heads read one key, which is what the cache keeps."""
    latent = LatentConfig(kv_rank=10, q_rank=14, nope_head_dim=6, rope_head_dim=4, value_head_dim=8)
    model = loaded(variant(kind="gpt", positions="rope", latent=latent), kernel)
    kept, shapes, core = list[torch.Size](), list[torch.Size](), AttentionCore.__call__

    def append(cache: KVCache, layer: Any, first: int, *new: Tensor) -> list[Tensor]:
        kept.extend(x.shape for x in new)
        return original(cache, layer, first, *new)

    def call(self: AttentionCore, qkv: QKV, *rest: Any) -> Any:
        shapes.append(qkv.key.shape)
        return core(self, qkv, *rest)

    original = KVCache.append
    monkeypatch.setattr(KVCache, "append", append)
    monkeypatch.setattr(AttentionCore, "__call__", call)
    generate(model, [[1, 2, 3, 4]], Sampling(3))
    assert kept == [(1, 1, 4, 14)] * 3 + [(1, 1, 1, 14)] * 6
    assert shapes == [(1, 4, 4, 10)] * 3 + [(1, 1, 5, 14)] * 3 + [(1, 1, 6, 14)] * 3


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_only_new_tokens_are_computed(kind: str) -> None:
    model = loaded(variant(kind=kind))
    lengths: list[int] = []
    model.runner.model.layers["0"].register_forward_hook(lambda _, inputs, __: lengths.append(len(inputs[0].hidden)))
    generate(model, [[1, 2, 3, 4]], Sampling(5))
    assert lengths == [4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9, temperature=0.0),
        Sampling(9, temperature=0.0, repetition_penalty=1.5),
        Sampling(9),
        Sampling(9, temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.2, seed=3),
    ],
    ids=str,
)
def test_a_prompt_among_others_gets_the_text_that_it_gets_alone(sampling: Sampling) -> None:
    eod = 17
    texts = generate(loaded(eod=eod), PROMPTS, sampling)
    assert texts == generate(loaded(eod=eod, rows=2), PROMPTS, sampling)
    assert texts == [generate(loaded(eod=eod), [prompt], sampling)[0] for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == plainly(loaded(eod=eod), prompt, sampling, eod)


def plainly(model: LoadedModel, prompt: list[int], sampling: Sampling, eod: int) -> list[int]:
    """The same text by reading all tokens again each time."""
    from pangu.topology.random import generator, random_key

    text: list[int] = []
    while len(text) < sampling.max_tokens and len(prompt) + len(text) <= TINY.sequence:
        used = torch.zeros(1, TINY.vocab, dtype=torch.bool)
        used[0, prompt + text] = True
        chance = generator(random_key(sampling.seed, "sample", *prompt), len(text)).random()
        token = int(pick(scores_of(model, prompt + text)[None], used, torch.tensor([chance]).double(), sampling))
        if token == eod:
            break
        text.append(token)
    return text


def test_the_same_seed_draws_the_same_text_and_another_another() -> None:
    model = loaded()
    first = generate(model, PROMPTS, Sampling(9))
    assert first == generate(model, PROMPTS, Sampling(9))
    assert first != generate(model, PROMPTS, Sampling(9, seed=1))
    greedy = generate(model, PROMPTS, Sampling(9, temperature=0.0))
    assert greedy == generate(model, PROMPTS, Sampling(9, temperature=0.0, seed=1))
    assert greedy == generate(model, PROMPTS, Sampling(9, top_k=1)) == generate(model, PROMPTS, Sampling(9, top_p=1e-9))


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_a_text_ends_with_the_window(kind: str) -> None:
    """The last token that is read stands at the last position, and the one after it is the last that is drawn."""
    model = loaded(variant(kind=kind))
    prompts = [[1] * length for length in (1, 20, TINY.sequence)]
    texts = generate(model, prompts, Sampling(1000))
    assert [len(text) for text in texts] == [TINY.sequence, 5, 1]
    assert texts[1] == generate(model, prompts[1:2], Sampling(5))[0]


def test_a_text_ends_before_what_ends_it() -> None:
    """At the end of document or a stop id, which is not part of it; the others go on."""
    free = generate(loaded(), PROMPTS, Sampling(12))
    eod, stop = free[0][4], free[2][3]
    texts = generate(loaded(eod=eod), PROMPTS, Sampling(12, stop=(stop,)))
    expected = [list(itertools.takewhile(lambda token: token not in (eod, stop), text)) for text in free]
    assert texts == expected
    assert len({len(text) for text in texts}) > 1


def test_tokens_are_told_as_they_are_drawn() -> None:
    told = list(draw(loaded(rows=2), PROMPTS, Sampling(4)))
    texts = generate(loaded(rows=2), PROMPTS, Sampling(4))
    assert [[token for number, token in told if number == i] for i in range(len(PROMPTS))] == texts
    # prompts of similar lengths grow side by side
    assert [number for number, _ in told] == [1, 3] * 4 + [0, 4] * 4 + [2] * 4


def test_a_prompt_that_has_ended_gets_no_more_tokens() -> None:
    ended: set[int] = set()
    drawn = []
    for number, _ in draw(loaded(), [[1, 2], [3, 4]], Sampling(4), ended):
        drawn.append(number)
        ended.add(0)
    assert (drawn.count(0), drawn.count(1)) == (1, 4)


def test_prompts_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError) as error:
        generate(loaded(), [[1], [], [1] * 25, [TINY.vocab]], Sampling(1))
    assert str(error.value).splitlines() == [
        "prompt 1: 0 tokens; use 1 to model.sequence = 24",
        "prompt 2: 25 tokens; use 1 to model.sequence = 24",
        "prompt 3: contains ids outside of model.vocab = 67",
    ]


def test_settings_that_make_no_sense_are_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        Sampling(0, -1.0, -2, 1.5, 0.0)
    words = [line.split(" = ")[0] for line in str(error.value).splitlines()]
    assert words == ["max_tokens", "temperature", "top_k", "top_p", "repetition_penalty"]
    for field, value in (("top_p", 0.0), ("top_p", -1.0)):
        with pytest.raises(UserError, match="must be above 0 and at most 1"):
            dataclasses.replace(Sampling(1), **{field: value})


def chances_by_hand(scores: list[float], used: set[int], sampling: Sampling) -> list[float]:
    """Probability of each id, in plain lines."""
    penalty = sampling.repetition_penalty
    scores = [s if i not in used else s / penalty if s > 0 else s * penalty for i, s in enumerate(scores)]
    scores = [s / sampling.temperature for s in scores]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: sampling.top_k or None]
    total = sum(math.exp(scores[i]) for i in order)
    kept: dict[int, float] = {}
    for i in order:
        if sum(kept.values()) < sampling.top_p:
            kept[i] = math.exp(scores[i]) / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(scores))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.5),
        Sampling(1, top_k=3),
        Sampling(1, top_p=0.7),
        Sampling(1, repetition_penalty=2.0),
        Sampling(1, 0.8, 4, 0.9, 1.3),
    ],
    ids=str,
)
def test_draws_have_the_probabilities_that_are_asked_for(sampling: Sampling) -> None:
    """20,000 evenly spaced places of the cumulative distribution: each id takes its share of them, to one place."""
    scores, used = [0.5, 2.0, -1.0, 1.5, 0.1, -0.3, 1.9], {1, 2, 5}
    count = 20000
    chances = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    mask = torch.tensor([i in used for i in range(len(scores))])
    ids = pick(torch.tensor(scores).expand(count, -1), mask.expand(count, -1), chances, sampling)
    found = Counter(ids.tolist())
    for i, expected in enumerate(chances_by_hand(scores, used, sampling)):
        assert abs(found[i] - count * expected) <= 1, i


def test_greedy_takes_the_most_probable_after_the_penalty() -> None:
    scores, none = torch.tensor([[1.0, 3.0, 2.0]]), torch.zeros(1, 3, dtype=torch.bool)
    chance = torch.zeros(1, dtype=torch.float64)
    assert pick(scores, none, chance, Sampling(1, 0.0)).tolist() == [1]
    used = torch.tensor([[False, True, False]])
    assert pick(scores, used, chance, Sampling(1, 0.0, repetition_penalty=2.0)).tolist() == [2]


def test_the_ends_of_the_distribution() -> None:
    """The first and the last chance that a generator gives draw ids that may be drawn."""
    chances = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    scores = torch.tensor([0.0, 2.0, -torch.inf]).expand(2, -1)
    assert pick(scores, torch.zeros(2, 3, dtype=torch.bool), chances, Sampling(1)).tolist() == [1, 0]


def test_scores_that_are_not_finite_do_not_end_the_command() -> None:
    ids = pick(
        torch.full((1, 3), torch.nan), torch.zeros(1, 3, dtype=torch.bool), torch.ones(1).double() / 2, Sampling(1)
    )
    assert 0 <= int(ids) < 3
