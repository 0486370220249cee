"""The code that goes with exported PanGu-α weights: what training and measuring them with other programs needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytest.importorskip("transformers")

from pangu.interop.formats.modeling_pangu import PanguConfig, PanguForCausalLM, PanguModel
from pangu.interop.formats.tokenization_pangu import PanguTokenizer


def small_model(positions: str = "absolute") -> PanguForCausalLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": 67, "max_position_embeddings": 16, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return PanguForCausalLM(PanguConfig(**sizes, **rates, initializer_range=0.2, position_embedding_type=positions))


IDS = torch.arange(24).view(2, 12)


def test_rotary_positions_with_cache_and_padding() -> None:
    """Keys that are kept have turned by their own positions, which padding on the left does not shift."""
    model = small_model("rotary").eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(IDS[:, :9])
    cached, plain = (model.generate(IDS[:, :9], attention_mask=mask, use_cache=on, **options) for on in (True, False))
    assert torch.equal(cached, plain)
    mask[1, :4] = 0
    batch = model.generate(IDS[:, :9], attention_mask=mask, **options)
    alone = model.generate(IDS[1:, 4:9], attention_mask=mask[1:, 4:], **options)
    assert torch.equal(batch[0], cached[0])
    assert torch.equal(batch[1, 9:], alone[0, 5:])


def test_other_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="position_embedding_type = 'alibi': must be absolute or rotary"):
        small_model("alibi")


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_gradient_checkpointing_gives_the_same_gradients(positions: str) -> None:
    """Bit for bit, and forward keeps less: each layer is computed twice."""
    gradients = []
    for on in (False, True):
        model = small_model(positions).train()
        calls = []
        model.transformer.h[2].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if on:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        assert len(calls) == 1 + on
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_the_head_is_the_word_embedding() -> None:
    model = small_model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(70)
    assert model(IDS).logits.shape == (2, 12, 70)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_positions_past_the_window_are_refused_in_words() -> None:
    """Padding takes none."""
    model = small_model().eval()
    long = torch.zeros(1, 18, dtype=torch.long)
    with pytest.raises(ValueError, match="a text of 18 tokens: the model has positions for 16"):
        model(long)
    with pytest.raises(ValueError, match="a text of 17 tokens"):
        model.generate(IDS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)
    mask = torch.ones_like(long)
    mask[:, :4] = 0
    assert model(long, attention_mask=mask).logits.shape == (1, 18, 67)


def test_of_two_caches_none_is_taken() -> None:
    """transformers before 5.24 makes one of its own beside what it is given as `cache`, and the other way round."""
    model = small_model().eval()
    given = model(IDS[:, :5]).to_tuple()[1]
    with pytest.raises(ValueError, match=r"differ; this version of transformers takes (cache|past_key_values)"):
        model(IDS[:, 5:], cache=given, past_key_values=DynamicCache())
    both = model(IDS[:, 5:], cache=given, past_key_values=given).logits
    torch.testing.assert_close(both, model(IDS).logits[:, 5:], atol=1e-5, rtol=1e-5)
    assert isinstance(model.config.keys_to_ignore_at_inference, list)  # to which transformers' Trainer adds one


@pytest.mark.parametrize("jieba", [True, False])
def test_the_end_of_a_document_has_a_text(jieba: bool, tmp_path: Path) -> None:
    """Programs that stop at the decoded end of a document would stop at once at an empty text."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x\n今天 是 一个 好 天气\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "small"),
        vocab_size=67,
        hard_vocab_limit=False,
        control_symbols=["<eot>", "<pad>", "<mask>"],
        user_defined_symbols=["▂", "▃"],
        minloglevel=2,
    )
    tokenizer = PanguTokenizer(str(tmp_path / "small.model"), jieba=jieba)
    end = tokenizer.eos_token_id
    words = tokenizer("今天 是")["input_ids"]
    assert tokenizer.decode([end]) == tokenizer.decode(end) == "<eot>"
    assert tokenizer.decode([*words, end, *words]) == "今天 是<eot>今天 是"
    assert tokenizer.decode([*words, end], skip_special_tokens=True) == "今天 是"


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_another_attention_function_computes_the_same_from_texts_in_one_row(
    positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.33 calls it: `AutoModel`'s class without masks or caches, two texts one after the other, then one token
    of each; the function keeps keys and values itself."""
    model = small_model(positions).eval()
    trunk = PanguModel(model.config).eval()
    trunk.load_state_dict(model.transformer.state_dict())
    kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    lengths = [5, 8]

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        assert mask is None
        results = []
        for text, (q, k, v) in enumerate(zip(*(part.split(lengths, 2) for part in (query, key, value)), strict=True)):
            earlier = kept.get((module.layer_idx, text))
            if earlier is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(earlier, (k, v), strict=True))
            kept[module.layer_idx, text] = k, v
            causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            results.append(functional.scaled_dot_product_attention(q, k, v, causal, scale=options["scaling"]))
        return torch.cat(results, 2).transpose(1, 2).flatten(0, 1).flatten(1), None  # [tokens, hidden]

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "a_stand_in", attend)
    trunk.config._attn_implementation = "a_stand_in"
    texts = [IDS[:1, :6], IDS[1:, :9]]
    places = [torch.arange(text.shape[1])[None] for text in texts]
    with torch.no_grad():
        expected = [small_model(positions).eval()(text).logits[0] for text in texts]
        for part in (slice(None, -1), slice(-1, None)):
            ids, where = (torch.cat([row[:, part] for row in rows], 1) for rows in (texts, places))
            (hidden, *_) = trunk(input_ids=ids, position_ids=where, use_cache=False, return_dict=False)
            logits = model.lm_head(hidden)[0]
            torch.testing.assert_close(logits, torch.cat([row[part] for row in expected]), atol=1e-5, rtol=1e-5)
            lengths = [1, 1]


def test_tensor_parallel_plan_names_every_matrix_of_a_layer() -> None:
    model = small_model()
    matrices = {name for name, module in model.transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    planned = {name.replace("*", str(layer)) for name in model.config.base_model_tp_plan for layer in range(3)}
    assert planned == matrices
