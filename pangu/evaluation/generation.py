"""Draws text from a model, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from pangu.config.schema import SampleConfig
from pangu.data.tokenizers import Tokenizer
from pangu.layers.masks import AttentionMask
from pangu.models.language_model import LanguageModel
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


@torch.no_grad()
def continue_text(
    model: LanguageModel,
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
        model: trained weights.
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
        positions = torch.arange(tokens.shape[1], device=device)[None]
        logits = model.logits(tokens, positions, AttentionMask(None))
        ids.append(pick(logits[len(seen) - 1, 0], config.temperature, config.top_k, source))
        if ids[-1] == eod:
            break
    return tokenizer.decode([token for token in ids if token != eod])
