"""The layouts that dry runs are tested in: every kind of parallelism, schedule, optimizer, format and offload."""

from __future__ import annotations

from typing import Any

from tests.configs import composed

SMALL = (
    "model=pangu_quickstart",
    "data=synthetic",
    "model.positions=learned",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.vocab=101",
    "model.sequence=16",
    "batch.global_size=4",
    "batch.micro_size=1",
    "validation.every=0",
    "metrics.tensorboard=false",
    "metrics.wandb=off",
    "parallel.bucket_mib=0.01",
)
SEGMENT = 2**21
"""Bytes of the smallest piece of memory that torch's allocator gets from the device, which stops the host."""
LAYOUTS = (
    "batch.global_size=2",
    "parallel.data=2",
    "parallel.data=2 parallel.overlap=false",
    "parallel.data=2 parallel.zero=1",
    "parallel.data=2 parallel.zero=2",
    "parallel.data=2 parallel.zero=3",
    "batch.global_size=8 parallel.data=4 parallel.zero=3 parallel.zero_group=2",
    "batch.global_size=8 parallel.data=4 parallel.zero=1 parallel.zero_group=2 precision.reduce=bf16",
    "batch.global_size=2 parallel.tensor=2 parallel.sequence=true",
    "batch.global_size=2 parallel.tensor=2 parallel.sequence=true parallel.overlap_chunks=2 memory.recompute=selective",
    "batch.global_size=2 parallel.tensor=2 parallel.overlap_chunks=4 loss.chunk=8",
    "parallel.context=2 parallel.context_kind=gather batch.global_size=2 precision=bf16 memory.recompute=selective",
    "parallel.context=4 parallel.context_kind=ring precision=bf16 parallel.tensor=2 parallel.sequence=true "
    "batch.global_size=2 model.positions=rope",
    "parallel.context=2 parallel.context_kind=ulysses parallel.pipeline=2 parallel.zero=1 data.packing.reset_mask=true "
    "data.packing.eod=3",
    "parallel.context=2 parallel.context_kind=ring parallel.data=2 parallel.zero=3 batch.global_size=4 precision=bf16 "
    "model.attention=flash data.packing.reset_mask=true data.packing.eod=3",
    "parallel.pipeline=2 parallel.schedule=gpipe model.tied_head=true",
    "parallel.pipeline=2 parallel.virtual_stages=2 model.layers=4 parallel.schedule=interleaved",
    "parallel.pipeline=2 parallel.virtual_stages=2 model.layers=4 parallel.schedule=breadth_first parallel.data=2 "
    "parallel.zero=3",
    "parallel.pipeline=2 parallel.schedule=zb_h1 parallel.tensor=2 parallel.sequence=true",
    "parallel.pipeline=2 parallel.virtual_stages=2 model.layers=4 parallel.schedule=zb_v model.positions=relative",
    "batch.global_size=8 parallel.pipeline=2 parallel.data=2 parallel.zero=2 parallel.tensor=2",
    "optimizer=lamb parallel.data=2 parallel.zero=2",
    "batch.global_size=2 optimizer=lamb parallel.tensor=2 precision=fp16",
    "precision=fp16 memory.recompute=full parallel.data=2",
    "precision=bf16 model.dropout=0.1 model.attention_dropout=0.1 parallel.data=2 parallel.zero=1",
    "batch.global_size=2 precision=bf16 data.packing.reset_mask=true data.packing.eod=3 model.positions=rope",
    "batch.global_size=2 precision=fp8 parallel.tensor=2 parallel.sequence=true parallel.overlap_chunks=2",
    "memory.offload=[optimizer] parallel.data=2 parallel.zero=1 precision=bf16",
    "memory.offload=[parameters] parallel.data=2 parallel.zero=3 precision=bf16",
    "batch.global_size=2 memory.offload=[activations]",
    "memory.offload=[activations,optimizer,parameters] parallel.data=2 parallel.zero=3 precision=bf16",
    "batch.global_size=2 parallel.tensor=2 parallel.sequence=true precision=fp8 model.experts=4 model.expert_ffn=16 "
    "model.expert_capacity=1 model.router.balance=bias memory.recompute=selective",
    "parallel.pipeline=2 parallel.schedule=zb_h1 parallel.data=2 parallel.zero=2 batch.global_size=8 precision=bf16 "
    "model.experts=4 model.shared_experts=1 memory.offload=[activations] model.layers=4",
    "parallel.pipeline=2 parallel.data=2 parallel.expert=2 parallel.two_batch_overlap=true batch.micro_size=2 "
    "batch.global_size=16 precision=bf16 model.experts=4 memory.offload=[activations] model.layers=4 parallel.zero=2",
)
"""At least two micro-batches, of a pipeline four. Left out are `parallel.tensor=2` and `parallel.pipeline=2` alone:
LAMB's layout and that of all axes show the same."""


def values(layout: str, *others: str) -> dict[str, Any]:
    """The composed configuration of a small run, changed by `others`, then by the layout."""
    return {**composed(*SMALL, *others, *layout.split()), "dry_run": True}
