"""One training step of a GPT on one process, ours beside others.

python -m benchmarks.train_step --output benchmarks/results/train_step.json
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.models import PlainGPT, loop, loss_of
from benchmarks.side_by_side import SHAPE, Step, command_line, measure

OURS = {"pangu": (), "pangu_whole": ("loss.chunk=null",), "pangu_compiled": ("compile=true",)}
PEERS = ("plain", *OURS, "transformers", "compiled")


class TransformersGPT2(nn.Module):
    """GPT-2 of the transformers library, with the loss."""

    def __init__(self, vocab: int, shape: Mapping[str, int] = SHAPE) -> None:
        super().__init__()
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
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [batch, sequence] both -> mean loss."""
        return loss_of(self.model(tokens, use_cache=False).logits, labels)


def transformers_gpt2(precision: str, vocab: int, micro: int, shape: Mapping[str, int] = SHAPE) -> Step:
    """It in the same loop."""
    model = TransformersGPT2(vocab, shape)
    return loop(model, model, precision, micro)


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
        case _:
            from benchmarks.trainer import pangu_step

            return pangu_step(precision, vocab, micro, *OURS[peer])


if __name__ == "__main__":
    measure(make, 1, command_line(__doc__, PEERS, threads=2))
