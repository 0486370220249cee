"""Draws text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.config.schema import SampleConfig
from pangu.data.batch import Batch
from pangu.data.tokenizers import Tokenizer
from pangu.pipeline.runner import Runner
from pangu.pipeline.schedule import Schedule, forward_only
from pangu.topology.mesh import Mesh
from pangu.topology.random import random_key


def pick(logits: Tensor, temperature: float, top_k: int, source: torch.Generator) -> int:
    """One id drawn from softmax(logits / temperature) over the `top_k` largest logits.

    Args:
        logits: [vocab].
        temperature: 0 takes the largest logit.
        top_k: 0 draws among all.
        source: CPU generator of the draw.
    """
    if temperature == 0:
        return int(logits.argmax())
    wide = logits.double().cpu() / temperature
    if 0 < top_k < wide.numel():
        wide = wide.masked_fill(wide < wide.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(wide.softmax(-1), 1, generator=source))


def continue_text(
    scores: Callable[[Tensor, int], Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    *,
    seed: int,
    window: int,
    eod: int | None,
    device: torch.device,
    multiple: int = 1,
) -> str:
    """The prompt and up to `config.tokens` tokens after it; stops at the end-of-document id.

    Args:
        scores: from tokens [1, sequence] and the place of one of them to the logits [vocab] of the token behind it.
        tokenizer: of the data that it was trained on.
        prompt: beginning of the text; an empty one starts from the end of a document.
        config: number of tokens and how to draw them.
        seed: the same seed draws the same text.
        window: tokens that the model can look back at.
        eod: end-of-document id.
        device: of the model.
        multiple: lengths are padded to a multiple of this; sequence parallelism needs the number of ranks. Padding
            stands behind the text, where a causal model does not look.
    """
    source = torch.Generator().manual_seed(random_key(seed, "sample", prompt))
    ids = tokenizer.encode(prompt) or ([eod] if eod is not None else [0])
    for _ in range(config.tokens):
        seen = ids[-window:]
        tokens = torch.tensor([seen + [0] * (-len(seen) % multiple)], device=device)
        ids.append(pick(scores(tokens, len(seen) - 1), config.temperature, config.top_k, source))
        if ids[-1] == eod:
            break
    return tokenizer.decode([token for token in ids if token != eod])


def next_token_scores(runner: Runner, schedule: Schedule, vocab: int, mesh: Mesh) -> Callable[[Tensor, int], Tensor]:
    """The `scores` of `continue_text` for a model that is spread over ranks; all of them must call it together.

    Args:
        runner: of this rank's stage.
        schedule: of training; its stages are used.
        vocab: number of words.
        mesh: who else takes part.
    """
    forward = forward_only(schedule, 1)
    wide = torch.promote_types(runner.dtype, torch.float32)

    def scores(tokens: Tensor, place: int) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=mesh.device)[None]
        batch = Batch(tokens, tokens, torch.zeros_like(tokens, dtype=torch.float32), positions, None, (0,))
        found = runner.forward(forward, [batch], lambda hidden, _: runner.model.logits_of(hidden)[place, 0].to(wide))
        logits = found[0] if found else torch.zeros(vocab, dtype=wide, device=mesh.device)
        return all_reduce(logits.contiguous(), mesh.group("pipeline"))

    return scores
