"""A two-stage pipeline of modules that are not pangu's, with the zero-bubble schedule ZB-H1:

torchrun --nproc-per-node=2 examples/pipeline_zero_bubble.py
"""

import os
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import pangu

LAYERS, WIDTH = 4, 32


def make_stage(layers: range) -> nn.Module:
    parts: list[nn.Module] = [nn.Embedding(256, WIDTH)] if layers.start == 0 else []
    for layer in layers:
        torch.manual_seed(layer)  # the same values wherever the layer is
        parts.append(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)))
    return nn.Sequential(*parts, *([nn.Linear(WIDTH, 256)] if layers.stop == LAYERS else []))


stages = int(os.environ.get("WORLD_SIZE", "1"))
mesh, each = pangu.connect(pipeline=stages), LAYERS // stages
torch.manual_seed(LAYERS)
chunks = [partial(make_stage, range(first, first + each)) for first in range(0, LAYERS, each)]
pipeline = pangu.Pipeline(chunks, mesh, micro_batches=4, schedule="zb_h1")
optimizer = pipeline.sharded.lamb(lr=0.01)
for step in range(1, 6):
    text = torch.randint(256, (4, 2, 17), generator=torch.Generator().manual_seed(step)).to(mesh.device)
    loss = pipeline.forward_backward(text[..., :-1], text[..., 1:], lambda y, t: F.cross_entropy(y.mT, t))
    done = pipeline.sharded.step(optimizer, clip=1.0, loss=loss)
    if mesh.is_first:
        print(f"step {step} | loss {done.loss:.5f} | grad norm {done.grad_norm:.5f}")
mesh.close()
