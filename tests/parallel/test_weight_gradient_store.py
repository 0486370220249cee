"""Weight gradients that are computed later are the same, arrive once, and leave nothing behind."""

from __future__ import annotations

import gc
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pangu.collectives.regions import TensorRegion
from pangu.data.batch import make_batch
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.models.language_model import Options, build_model
from pangu.models.parameters import ModelPart
from pangu.schedule.orders import OVERLAPPED
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero import gradients, weight_gradients
from pangu.zero.sharded import ShardedParameters
from tests.configs import tiny
from tests.threads import Ranks
from tests.weights import whole_loss

MICRO_BATCHES = 3


class Run:
    """A model with its gradient buffers, and some micro-batches."""

    def __init__(self, tensor: int, store: WeightGradientStore | None, overrides: tuple[str, ...]) -> None:
        config = tiny("precision=fp64", "parallel.bucket_mib=0.001", *overrides)
        self.mesh = Mesh.connect(Layout(tensor=tensor, sequence=tensor > 1), torch.device("cpu"))
        memory = config.memory
        options = Options("reference", memory.recomputed_layers, memory.recomputed_parts, config.loss_chunk)
        region = TensorRegion.of(self.mesh, config.parallel.overlap_chunks)
        self.model, _ = build_model(
            config.model, options, Builder(PlacementTable(), region=region, store=store, layers_store=store)
        )
        parts = {0: ModelPart.full(config.model)}
        self.parameters = ShardedParameters.of_run(self.model, parts, self.mesh, config, reduce_each=False)
        self.gradients = self.parameters.gradients
        tokens = np.random.default_rng(1).integers(0, 101, (2 * MICRO_BATCHES, 17))
        rows = [(2 * i, 2 * i + 1) for i in range(MICRO_BATCHES)]
        self.batches = [make_batch(tokens[list(pair)], pair, config.data.packing) for pair in rows]
        self.store = store
        self.gradients.start_step()

    def add_products(self) -> None:
        """Let products add to the sums, as in the trainer, if there is a store."""
        if self.store is not None:
            self.store.sums = weight_gradients.GradientAccumulator(self.gradients, self.model)

    def backward(self, number: int) -> None:
        """Forward and backward of a micro-batch."""
        batch = self.batches[number]
        whole_loss(self.model, batch, DropoutKeys(1, 0, batch.samples)).backward()

    def sums(self) -> dict[str, Tensor]:
        """Gradients summed over all ranks and micro-batches."""
        self.gradients.finish()
        return {shard.placement.name: shard.main.grad.clone() for shard in self.parameters.shards}


def same_bits(rank: int, tensor: int, overrides: tuple[str, ...]) -> None:
    """At once, each put aside until its backward ends, and one micro-batch behind."""
    usual = Run(tensor, None, overrides)
    for number in range(MICRO_BATCHES):
        usual.backward(number)
    expected = usual.sums()
    assert all(gradient.abs().max() > 0 for gradient in expected.values())

    for behind in (0, 1):
        store = WeightGradientStore()
        run = Run(tensor, store, overrides)
        for number in range(MICRO_BATCHES):
            with store.open(number):
                run.backward(number)
            if number >= behind:
                store.flush(number - behind)
        for number in range(MICRO_BATCHES - behind, MICRO_BATCHES):
            store.flush(number)
        sums = run.sums()
        assert [name for name, gradient in sums.items() if not torch.equal(gradient, expected[name])] == []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("memory.recompute=full",),
        ("memory.recompute=selective", "model.tied_head=false", "model.activation=swiglu"),
        ("memory.recompute=full", "model.dropout=0", "model.biases=false", "model.positions=rope"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_later_gradients_have_the_same_bits(ranks: Ranks, kind: str, overrides: tuple[str, ...]) -> None:
    """In one process, and on two ranks with sequence parallelism with products whole and in chunks."""
    chosen = (f"model.kind={kind}", *overrides)
    same_bits(0, 1, chosen)
    ranks.run(2, same_bits, chosen)
    ranks.run(2, same_bits, (*chosen, "parallel.tensor=2", "parallel.overlap_chunks=3"))


@pytest.mark.parametrize("chunk", ["null", "5"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_parameter_counts_once(tied: str, chunk: str) -> None:
    """A unit goes to the replicas when it is complete and not before, the tied table's lookup included; what is put
    aside is in nobody's gradient. Where the loss is computed in chunks, the head's is added in forward, and only an
    untied one is complete before the others are flushed."""
    store = WeightGradientStore()
    run = Run(1, store, (f"loss.chunk={chunk}", f"model.tied_head={tied}", "model.kind=gpt"))
    run.add_products()
    run.backward(0)  # not held: as usual
    sent: list[tuple[Tensor, Tensor]] = []

    def send(grad: Tensor, group: object) -> None:
        sent.append((grad, grad.clone()))

    with patch.object(gradients, "start_ordered_all_reduce", send):
        run.gradients.expect(0)
        with store.open(1):
            run.backward(1)
        # the final norm has nothing to wait for, nor has a head whose gradient forward made
        assert len(sent) < (2 if chunk == "null" or tied == "true" else 3)
        store.flush(1)
        assert len(sent) == len(run.parameters.flat_parameters) > 3
    assert all(torch.equal(now, then) for now, then in sent)


@pytest.mark.parametrize("chunk", ["null", "5"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_unit_goes_when_its_products_are_added(tied: str, chunk: str) -> None:
    """Within backward, with the sums that autograd's gradients give; autograd is given none of a matrix, nor of the
    table of words."""
    sums, sent = [], []
    matrices, narrow = set(), []

    def product(total: Tensor, left: Tensor, right: Tensor, begins: bool, _: bool) -> None:
        matrices.add(total.data_ptr())
        torch.addmm(total, left, right, beta=0 if begins else 1, out=total)

    def send(grad: Tensor, group: object) -> None:
        sent.append((grad, grad.clone()))

    for store in (None, WeightGradientStore()):
        overrides = (f"loss.chunk={chunk}", f"model.tied_head={tied}", "model.kind=gpt")
        run = Run(1, store, overrides)
        run.add_products()
        trained = dict(run.model.named_parameters())
        for name, parameter in trained.items() if store else ():
            parameter.register_hook(lambda grad, name=name: narrow.append(name) if grad is not None else None)
        with (
            patch.object(gradients, "start_ordered_all_reduce", send),
            patch.object(weight_gradients, "add_matmul", product),
        ):
            run.backward(0)
            run.gradients.expect(0)
            run.backward(1)
        assert len(sent) == len(run.parameters.flat_parameters) > 3
        assert all(torch.equal(now, then) for now, then in sent)
        sums.append([now for now, _ in sent])
        sent.clear()
    torch.testing.assert_close(*sums, rtol=0, atol=1e-12)  # a product and a sum are one operation
    tables = {name for name in trained if name.startswith("embedding")}
    expected = {name for name, parameter in trained.items() if parameter.dim() == 2} - tables
    assert not {*expected, "embedding.word.weight"} & set(narrow)
    assert len(matrices) == len(expected) + (tied == "true")


def live_storages() -> dict[int, int]:
    """Address and bytes of the memory of all tensors that anything refers to."""
    gc.collect()
    storages = (thing.untyped_storage() for thing in gc.get_objects() if is_tensor(thing))
    return {storage._cdata: storage.nbytes() for storage in storages}


def is_tensor(thing: object) -> bool:
    return isinstance(thing, Tensor)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_was_put_aside_is_freed(recompute: str) -> None:
    """Inputs and output gradients of 3 layers' products wait, and nothing else of the graph does: a layer's products
    read 3 hidden states (queries', keys' and values', the output's, the up-projection's) and one of the inner width,
    and their outputs' gradients are 3 + 1 + 1 hidden states and one of the inner width; the head's are its input and
    the logits' gradient, and the table's a lookup's."""
    store = WeightGradientStore()
    run = Run(1, store, ("model.kind=gpt", f"memory.recompute={recompute}"))
    with store.open("first"):  # the mask is made once for each length, and stays
        run.backward(0)
    store.flush("first")
    before = live_storages()
    with store.open("first"):
        run.backward(0)
    # what other tests left behind may go at any time
    held = sum(size for address, size in live_storages().items() if address not in before)
    tokens, hidden, inner, vocab = 2 * 16, 32, 4 * 32, 101
    numbers = 3 * (3 * hidden + inner + 5 * hidden + inner) + (hidden + vocab) + hidden
    assert 8 * tokens * numbers <= held <= 1.05 * 8 * tokens * numbers
    store.flush("first")
    assert sum(size for address, size in live_storages().items() if address not in before) == 0


def test_a_failed_step_leaves_no_half_of_a_micro_batch_behind() -> None:
    """A gradient is complete when both halves have added to it, those of the next step."""
    weight, total, eye, completed = nn.Parameter(torch.zeros(2, 2)), torch.zeros(2, 2), torch.eye(2), list[Tensor]()
    model = Mock(embedding=None, input_matrix=None, turns=OVERLAPPED, layers=nn.ParameterList([weight]))
    sums = Mock(sum_of=lambda parameter: (total, False), complete=completed.append)
    store = WeightGradientStore()
    store.sums = weight_gradients.GradientAccumulator(sums, model)
    store.sums.add(weight, eye, eye)
    store.clear()
    for number in (0, 1, 1, 2):
        store.sums.add(weight, eye, eye)
        assert len(completed) == number
    assert torch.equal(total, 5 * eye)
