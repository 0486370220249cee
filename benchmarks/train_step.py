"""One training step of a GPT on one process, ours beside others.

python -m benchmarks.train_step --output benchmarks/results/train_step.json
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.models import PlainGPT, loop, pangu_step
from benchmarks.side_by_side import SHAPE, Step, command_line, measure

PEERS = ("plain", "pangu", "pangu_chunked", "transformers", "compiled")


def transformers_gpt2(precision: str, vocab: int, micro: int, shape: Mapping[str, int] = SHAPE) -> Step:
    """GPT-2 of the transformers library in the same loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_positions=shape["sequence"],
        n_embd=shape["hidden"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loop(model, loss, precision, micro)


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    match peer:
        case "plain":
            model = PlainGPT(vocab)
            return loop(model, model, precision, micro)
        case "compiled":
            model = PlainGPT(vocab)
            return loop(model, torch.compile(model), precision, micro)
        case "transformers":
            return transformers_gpt2(precision, vocab, micro)
        case "pangu_chunked":
            return pangu_step(precision, vocab, micro, "loss.chunk=512")
        case _:
            return pangu_step(precision, vocab, micro)


if __name__ == "__main__":
    measure(make, 1, command_line(__doc__, PEERS, threads=2))
