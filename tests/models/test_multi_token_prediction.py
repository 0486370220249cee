"""Multi-token prediction equals plain lines of torch after equations 21 to 25 of DeepSeek-V3, and no layout cuts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import newest_checkpoint, read_tensor
from pangu.config.build import build
from pangu.config.model import RouterConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, with_mtp_targets
from pangu.interop.loading import load_model
from pangu.models.size import num_parameters, training_flops_per_token
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.resuming import begin_with
from pangu.training.run import run
from pangu.training.step import Trainer
from tests.configs import composed
from tests.end_to_end.commands import SMALL
from tests.models.helpers import logical_gradients, logical_weights, make, variant
from tests.models.test_variants import EOD, LATENT, Plain, batch_of
from tests.parallel.harness import OVERRIDES, small_trainer, whole
from tests.weights import whole_loss
from tools import convert_checkpoint

LAYER = {"norm": "rmsnorm", "activation": "swiglu", "biases": False, "positions": "rope", "tied_head": False}


class Predicting(Plain):
    """With modules of multi-token prediction. A text [sequence + 1] is the tokens, then the last label."""

    def losses(self, batch: Batch, eod: int = EOD) -> list[tuple[Tensor, int]]:
        """For the next token and for each module, the sum of the losses and the number of targets."""
        hidden = self.hidden(batch)
        found = [(self.loss(batch), int(batch.weights.sum()))]
        text = torch.cat([batch.tokens, batch.labels[:, -1:]], 1)
        length = batch.tokens.shape[1]
        for module in range(self.c.mtp_layers):
            name, ahead = f"mtp.{module}", module + 1
            known = torch.cat([text[:, ahead:], text[:, :1].expand(-1, ahead - 1)], 1)
            embedded = self.norm(self.w["embedding.word.weight"][known], f"{name}.embedding_norm")
            merged = torch.cat([embedded, self.norm(hidden, f"{name}.hidden_norm")], -1)
            self.below = []
            hidden = self.block(merged @ self.w[f"{name}.merge.weight"].T, self.c.layers + module, batch)
            hidden = self.norm(hidden, f"{name}.output_norm")
            chances = self.scores(hidden).log_softmax(-1)
            targets = [
                (row, place)
                for row in range(len(text))
                for place in range(length - ahead)
                if eod not in text[row, place : place + ahead + 1] and batch.weights[row, place + ahead]
            ]
            losses = [-chances[row, place, text[row, place + ahead + 1]] for row, place in targets]
            found.append((torch.stack(losses).sum(), len(targets)))
        return found


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "gpt", "mtp_layers": 1, **LAYER},
        {"kind": "gpt", "mtp_layers": 2, "norm_placement": "sandwich", "kv_heads": 2},
        {"kind": "pangu", "mtp_layers": 2, "residual_scores": True},
        {"kind": "pangu", "mtp_layers": 1, "final_norm": "after_query", "embedding_norm": True},
        {"kind": "gpt", "mtp_layers": 3, "experts": 4, "expert_ffn": 20, "expert_every": 2, **LAYER},
        # as in openPangu-Ultra-MoE
        {
            **{"kind": "gpt", "mtp_layers": 1, "latent": LATENT, "norm_placement": "sandwich", "experts": 4, **LAYER},
            **{"expert_ffn": 20, "shared_experts": 1, "dense_layers": 1, "router": RouterConfig("sigmoid", scale=2.5)},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [None, 16])
def test_losses_and_every_gradient(changes: dict[str, object], chunk: int | None) -> None:
    """fp64, as in `test_variants`; the modules count half."""
    config = variant(**changes)
    model, table = make(config)
    assert model.head is not None
    model.head.chunk = chunk
    weights = {name: weight.requires_grad_() for name, weight in logical_weights(model, table).items()}
    batch = with_mtp_targets(batch_of(config), config.mtp_layers, EOD)
    assert batch.mtp_weights is not None
    expected, counts = zip(*Predicting(weights, config).losses(batch), strict=True)
    assert batch.mtp_weights.sum((0, 2)).tolist() == list(counts[1:])
    halved = replace(batch, mtp_weights=batch.mtp_weights / 2)
    losses = whole_loss(model, halved)
    factors = torch.tensor([1.0] + [0.5] * config.mtp_layers)
    torch.testing.assert_close(losses, torch.stack(expected) * factors, atol=1e-11, rtol=1e-11)
    losses.sum().backward()
    (torch.stack(expected) * factors).sum().backward()
    for name, gradient in logical_gradients(model, table).items():
        torch.testing.assert_close(gradient, weights[name].grad, atol=1e-9, rtol=1e-10, msg=name)


def test_without_labels_ahead_the_model_is_the_one_without_the_modules() -> None:
    """As in validation and sampling during training."""
    config = variant(kind="gpt", mtp_layers=2)
    model, _ = make(config)
    without, _ = make(replace(config, mtp_layers=0))
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(whole_loss(model, batch_of(config)), whole_loss(without, batch_of(config)))


@pytest.mark.parametrize("resets", [True, False])
def test_nothing_is_predicted_across_the_end_of_a_document(resets: bool) -> None:
    """The first row has documents of 5, 7 and 12 tokens. Module j has no target for the last j + 1 of a document, and
    for the last j of the third one, which goes on behind the row."""
    batch = with_mtp_targets(batch_of(variant(), resets), 3, EOD)
    assert batch.mtp_weights is not None
    expected = [(5 - j - 1) + (7 - j - 1) + (12 - j) for j in (1, 2, 3)]
    assert batch.mtp_weights[0].sum(-1).tolist() == expected


def test_a_step_adds_the_weighted_mean_of_the_modules() -> None:
    """Over four micro-batches with different numbers of targets, as the norm of the gradient shows."""
    same = (*OVERRIDES, "model.dropout=0", "model.attention_dropout=0", "precision=fp64", "loss.mtp_weight=0.7")
    words = (*same, "model.kind=gpt", "model.mtp_layers=2", "batch.global_size=4", "batch.micro_size=1")
    trainer, batches = small_trainer(Layout(), *words)
    weights = {name: value.clone().requires_grad_() for name, value in whole(trainer, of_gradients=False).items()}
    plain = Predicting(weights, trainer.config.model)
    result = trainer.train_step(batches)
    main, *modules = zip(*(plain.losses(batch, eod=3) for batch in batches), strict=True)
    means = [sum(loss for loss, _ in each) / sum(count for _, count in each) for each in (main, *modules)]
    assert len({count for _, count in main}) > 1
    assert result.loss == pytest.approx(float(means[0].detach()), rel=1e-12)
    assert result.mtp_loss == pytest.approx(float((means[1] + means[2]).detach()) / 2, rel=1e-12)
    (means[0] + 0.7 * (means[1] + means[2]) / 2).backward()
    squares = [float(weight.grad.square().sum()) for weight in weights.values() if weight.grad is not None]
    assert result.grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"experts": 4, "expert_ffn": 20, "activation": "swiglu"}], ids=str)
def test_sizes_count_the_modules(changes: dict[str, object]) -> None:
    """Each has a layer, three norms, a matrix of two hidden states, and the head once more."""
    config = variant(kind="gpt", **changes)
    _, table = make(replace(config, mtp_layers=2))
    assert num_parameters(replace(config, mtp_layers=2)) == sum(tensor.numel for tensor in table)
    longer, width = replace(config, layers=config.layers + 2), config.hidden
    more = training_flops_per_token(replace(config, mtp_layers=2)) - training_flops_per_token(longer)
    assert more == pytest.approx(3 * 2 * 2 * (2 * width**2 + config.vocab * width))


SMALLER = (*SMALL, "data=synthetic", "model.kind=gpt", "model.layers=2", "model.experts=2", "model.router.balance=bias")


def test_weights_are_taken_with_and_without_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with one module; then its weights in models with none, for generation too, and with two."""
    words = (*SMALLER, "validation.every=0", "train.steps=1", "lr_schedule.warmup_steps=1", "train.device=cpu")
    run(composed(*words, "model.mtp_layers=1", f"train.output={tmp_path}"))
    path = newest_checkpoint(tmp_path)
    index, mesh = read_index(path), Mesh.connect(Layout(), torch.device("cpu"))
    stored = {name for name in index["tensors"] if name.startswith("weight/")}
    begun = {}
    for modules in (0, 2):
        config = build(RunConfig, composed(*words, f"model.mtp_layers={modules}", "parallel.data=1"))
        trainer = Trainer(config, mesh)
        before = {name: value.clone() for name, value in whole(trainer, of_gradients=False).items()}
        capsys.readouterr()
        begin_with(path, config, trainer)
        for name, weight in whole(trainer, of_gradients=False).items():
            known = f"weight/{name}" in stored
            assert torch.equal(weight, read_tensor(path, index, f"weight/{name}") if known else before[name]), name
        begun[modules] = {f"weight/{name}" for name in before}
        line = capsys.readouterr().err.partition("\n")[0]
        count = len(begun[modules] ^ stored)
        expected = "left out" if modules == 0 else "missing, so they are initialized at random"
        assert line == f"{path}: {count} tensors of multi-token prediction: {expected}"
    assert begun[0] < stored < begun[2]
    model = load_model(tmp_path, mesh).runner.model
    assert model.config.mtp_layers == 0
    assert sum(one.numel() for one in model.parameters()) == num_parameters(model.config)


def test_an_export_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("model.positions=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.biases=false")
    words = (
        *SMALLER,
        *own,
        "model.experts=null",
        "model.router.balance=sequence",
        "validation.every=0",
        "train.steps=1",
    )
    more = ("validation.every=0", "train.steps=1", "lr_schedule.warmup_steps=1", "train.device=cpu")
    run(composed(*words, *more, "model.mtp_layers=1", f"train.output={tmp_path}/run"))
    for target, names in (("huggingface", "model.mtp_layers = 1: left out"), ("pangu", "")):
        capsys.readouterr()
        files = ["--input", f"{tmp_path}/run", "--output", f"{tmp_path}/{target}"]
        assert convert_checkpoint.main(["--from", "pangu", "--to", target, *files]) == 0
        assert capsys.readouterr().out.startswith(names)
    kept = read_index(newest_checkpoint(tmp_path / "pangu"))["tensors"]
    assert kept.keys() == {x for x in read_index(newest_checkpoint(tmp_path / "run"))["tensors"] if x[:7] == "weight/"}
    exported = (tmp_path / "huggingface" / "config.json").read_text(encoding="utf-8")
    assert json.loads(exported)["num_hidden_layers"] == 2
