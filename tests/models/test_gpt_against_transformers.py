"""GPT computes what transformers' GPT-2 computes from the same weights."""

from __future__ import annotations

import pytest
import torch

from pangu.config.data import PackingConfig
from pangu.data.batch import make_batch
from pangu.evaluation.generation import Sampling, generate
from pangu.evaluation.inference import LoadedModel
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Runner
from pangu.schedule.schedule import make_schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from tests.models.helpers import logical_gradients, logical_weights, make, variant
from tests.weights import whole_logits, whole_loss

transformers = pytest.importorskip("transformers")

GPT = variant(kind="gpt")
PLAIN = PackingConfig(eod=None, pad=None, reset_mask=False, reset_positions=False)
TOKENS = torch.randint(0, GPT.vocab, (3, GPT.sequence + 1), generator=torch.Generator().manual_seed(0))


def gpt2_names(name: str) -> tuple[str, int | None, bool]:
    """Our tensor's place in GPT-2: parameter, third of the fused projection (None: all of it), transposed or not."""
    simple = {
        "embedding.word.weight": "transformer.wte.weight",
        "embedding.position.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    if name in simple:
        return simple[name], None, False
    _, layer, *rest, kind = name.split(".")
    part = ".".join(rest)
    places = {
        "attention_norm": ("ln_1", None),
        "mlp_norm": ("ln_2", None),
        "attention.query": ("attn.c_attn", 0),
        "attention.key": ("attn.c_attn", 1),
        "attention.value": ("attn.c_attn", 2),
        "attention.output": ("attn.c_proj", None),
        "mlp.up": ("mlp.c_fc", None),
        "mlp.down": ("mlp.c_proj", None),
    }
    theirs, third = places[part]
    # GPT-2 stores its projections as [in, out]
    return f"transformer.h.{layer}.{theirs}.{kind}", third, kind == "weight" and "norm" not in part


def as_ours(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """GPT-2's tensor in our orientation."""
    theirs, third, transposed = gpt2_names(name)
    tensor = tensors[theirs]
    if third is not None:
        tensor = tensor.chunk(3, dim=-1)[third]
    return tensor.t() if transposed else tensor


def pair(dtype: torch.dtype = torch.float32, activation: str = "gelu_tanh"):
    """Our model and GPT-2 with the same weights."""
    ours, table = make(variant(kind="gpt", activation=activation), dtype=dtype)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=GPT.vocab,
            n_positions=GPT.sequence,
            n_embd=GPT.hidden,
            n_layer=GPT.layers,
            n_head=GPT.heads,
            activation_function="gelu_new" if activation == "gelu_tanh" else "gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    ).to(dtype)
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in logical_weights(ours, table).items():
            as_ours(name, parameters).copy_(weight)
    return ours, table, theirs


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_logits_loss_and_every_gradient_equal_to_1e5_in_fp32(activation: str) -> None:
    ours, table, theirs = pair(activation=activation)
    tokens, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    positions = torch.arange(GPT.sequence).expand_as(tokens)
    logits = whole_logits(ours, tokens, positions).transpose(0, 1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    loss = whole_loss(ours, make_batch(TOKENS.numpy(), range(3), PLAIN)) / labels.numel()
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)

    loss.backward()
    expected_loss.backward()
    theirs_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    gradients = logical_gradients(ours, table)
    assert len(gradients) == 4 + 16 * GPT.layers
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, as_ours(name, theirs_gradients), atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_kernels_agree_in_fp64(kernel: str) -> None:
    """1e-12: both kernels sum at most 32 products and 24 exponentials in fp64 (rounding 1.1e-16 each)."""
    ours, _, theirs = pair(torch.float64)
    other, _ = make(GPT, kernel, torch.float64)
    other.load_state_dict(ours.state_dict())
    positions = torch.arange(GPT.sequence).expand(3, -1)
    logits = whole_logits(other, TOKENS[:, :-1], positions).transpose(0, 1)
    torch.testing.assert_close(logits, theirs(TOKENS[:, :-1]).logits, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_decoding_gives_its_tokens(penalty: float) -> None:
    """A batch of prompts of several lengths, with transformers' own cache; fp64, so that no two scores are close."""
    ours, _, theirs = pair(torch.float64)
    runner = Runner(ours, {0: ModelPart.full(ours.config)}, 0, "rank 0", None, torch.float64, TensorRank())
    model = LoadedModel(runner, make_schedule("1f1b", 1, 1, 1), Mesh(Layout(), 0, torch.device("cpu")), GPT, None, None)
    prompts = [TOKENS[0, :2].tolist(), TOKENS[1, :9].tolist(), TOKENS[2, :5].tolist()]
    texts = generate(model, prompts, Sampling(12, temperature=0.0, repetition_penalty=penalty))
    for prompt, text in zip(prompts, texts, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=12,
            repetition_penalty=penalty,
        )
        assert prompt + text == expected[0].tolist()


def test_a_20_step_adamw_run_tracks_it() -> None:
    """Losses of both runs agree to 1e-5 in every step, and fall."""
    from pangu.training.step import Trainer
    from tests.configs import tiny

    config = tiny(
        "model.hidden=32",
        f"model.vocab={GPT.vocab}",
        f"model.sequence={GPT.sequence}",
        "batch.global_size=3",
        "batch.micro_size=3",
        "model.dropout=0",
        "model.attention_dropout=0",
        "optimizer.clip=1.0",
        "optimizer.lr=0.01",
        "lr_schedule=constant",
        "lr_schedule.warmup_steps=0",
        kind="gpt",
    )
    ours, table, theirs = pair()
    trainer = trainer_with_weights(config, logical_weights(ours, table))
    assert isinstance(trainer, Trainer)
    decayed = [p for p in theirs.parameters() if p.dim() == 2]
    bare = [p for p in theirs.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.optimizer.weight_decay}, {"params": bare, "weight_decay": 0.0}],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        logits = theirs(TOKENS[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        result = trainer.train_step([make_batch(TOKENS.numpy(), range(3), PLAIN)])
        assert result.loss == pytest.approx(float(loss.detach()), abs=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        losses.append(result.loss)
    assert losses[-1] < 0.5 * losses[0]


def trainer_with_weights(config, weights):
    """A trainer on one process whose model starts from the given logical weights."""
    from pangu.topology.layout import Layout
    from pangu.topology.mesh import Mesh
    from pangu.training.step import Trainer

    trainer = Trainer(config, Mesh(Layout(), 0, torch.device("cpu")))
    with torch.no_grad():
        for shard in trainer.parameters.shards:
            shard.main.copy_(weights[shard.placement.name].flatten())
    trainer.parameters.publish()
    return trainer
