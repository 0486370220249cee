"""A tensor-parallel MLP with sequence parallelism in an ordinary loop, equal to the MLP of one process:

torchrun --nproc-per-node=2 examples/tensor_parallel_mlp.py
"""

import os

import torch
from torch import nn

import pangu

mesh = pangu.connect(tensor=int(os.environ.get("WORLD_SIZE", "1")), sequence=True)
torch.manual_seed(0)  # the same values on every rank
up, down = nn.Linear(16, 64), nn.Linear(64, 16)
mlp = nn.Sequential(nn.LayerNorm(16), pangu.column_parallel(up, mesh), nn.GELU(), pangu.row_parallel(down, mesh))
sharded = pangu.shard(mlp, mesh)
optimizer = sharded.adamw(lr=0.01)

for step in range(1, 6):
    x = torch.randn(12, 4, 16, generator=torch.Generator().manual_seed(step))  # [sequence, batch, width]
    x, target = (pangu.local_sequence(part, mesh).to(mesh.device) for part in (x, x.roll(1)))
    loss = (mlp(x) - target).square().sum() / (12 * 4 * 16)  # this rank's part of the mean
    loss.backward()
    done = sharded.step(optimizer, clip=1.0, loss=loss)
    if mesh.is_first:
        print(f"step {step} | loss {done.loss:.5f} | grad norm {done.grad_norm:.5f}")
mesh.close()
