"""ZeRO-3 with LAMB around a model that is not pangu's, in an ordinary loop:

torchrun --nproc-per-node=2 examples/zero3_lamb.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import pangu

mesh = pangu.connect(zero=3)
torch.manual_seed(0)  # the same values on every rank
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0) for _ in range(3)]
model = nn.Sequential(nn.Embedding(256, 32), *layers, nn.Linear(32, 256))
model[-1].weight = model[0].weight  # tied
sharded = pangu.shard(model, mesh)
optimizer = sharded.lamb(lr=0.01)

for step in range(1, 6):
    text = torch.randint(256, (17, 8), generator=torch.Generator().manual_seed(step))  # [sequence + 1, batch]
    text = text.chunk(mesh.layout.replicas, dim=1)[mesh.replica].to(mesh.device)
    loss = F.cross_entropy(model(text[:-1]).flatten(0, 1), text[1:].flatten())
    loss.backward()
    done = sharded.step(optimizer, clip=1.0, loss=loss)
    if mesh.is_first:
        print(f"step {step} | loss {done.loss:.5f} | grad norm {done.grad_norm:.5f}")
mesh.close()
