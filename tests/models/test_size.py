"""Parameter counts and FLOPs are the published ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pangu.config.sparse import FixedSparsity
from pangu.models.language_model import build_model
from pangu.models.size import num_parameters, training_flops_per_token
from tests.configs import RECIPES, config
from tests.models.helpers import make, variant
from tests.weights import whole_logits

PUBLISHED = {
    "pangu_350m": 345_368_576,
    "pangu_2_6b": 2_625_295_360,
    "pangu_13b": 12_800_870_400,
    "pangu_200b": 206_861_008_896,
    "gpt2_124m": 124_439_808,
    "gpt3_125m": 125_226_240,
    "gpt3_350m": 355_871_744,
    "gpt3_760m": 760_300_032,
    "gpt3_1_3b": 1_315_723_264,
    "gpt3_2_7b": 2_651_553_280,
    "gpt3_6_7b": 6_658_404_352,
    "gpt3_13b": 12_853_386_240,
    "gpt3_175b": 174_604_259_328,
    "mixtral_8x7b": 46_702_792_704,
    "pangu_pro_moe": 71_988_781_056,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # 671,026,419,200 with the biases by which the experts of 58 layers are chosen
    "deepseek_v3_671b": 671_026_419_200 - 58 * 256,
    # counted by hand from the released config.json; 717.9 billion without the embedding, published as 718
    "openpangu_ultra_moe_718b": 719_093_767_680,
}
ACTIVE = {
    "mixtral_8x7b": 12_879_925_248,
    "pangu_pro_moe": 16_498_136_448,
    "qwen3_30b_a3b": 3_353_032_704,
    "deepseek_v3_671b": 37_552_282_624,
    "openpangu_ultra_moe_718b": 40_371_494_400,
    "gpt_oss_20b": 4_187_440_704,
    "gpt_oss_120b": 5_711_982_912,
}
"""Weights that a token passes: 12.9 billion (Jiang et al. 2024), 16.5 (arXiv 2505.21411), 3.3 (Yang et al. 2025),
37 (arXiv 2412.19437, without one of two embeddings), 3.6 and 5.1 (arXiv 2508.10925, without it), and 39 (the card of
openPangu-Ultra-MoE, without it)."""


GPT3 = {
    "125m": 125e6,
    "350m": 350e6,
    "760m": 760e6,
    "1_3b": 1.3e9,
    "2_7b": 2.7e9,
    "6_7b": 6.7e9,
    "13b": 13e9,
    "175b": 175e9,
}
"""Sizes of Brown et al. 2020, table 2.1, which rounds to two or three digits."""


@pytest.mark.parametrize("size", GPT3)
def test_gpt3_has_the_sizes_of_its_paper(size: str) -> None:
    assert num_parameters(config(f"+config=gpt3_{size}").model) == pytest.approx(GPT3[size], rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_number_of_parameters_on_the_meta_device(recipe: str) -> None:
    """Those of the words are stored with the padding that makes their number a multiple of 128."""
    of_model = config(f"+config={recipe}").model
    model, table = build_model(of_model)
    assert all(parameter.is_meta for parameter in model.parameters())
    numel = sum(tensor.numel for tensor in table)
    padding = sum(parameter.numel() for parameter in model.parameters()) - numel
    assert padding == -of_model.vocab % 128 * of_model.hidden * (1 if of_model.tied_head else 2)
    assert numel == num_parameters(of_model) == PUBLISHED.get(recipe, numel)
    active = num_parameters(of_model, active=True)
    assert active == ACTIVE.get(recipe, active)
    assert (active < numel) == (of_model.experts is not None)


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_flops_equal_torchs_count_of_the_matrix_products(kind: str) -> None:
    model, _ = make(variant(kind=kind, ffn=96), "reference")
    tokens = torch.zeros(2, 24, dtype=torch.long)
    positions = torch.arange(24).expand_as(tokens)
    with FlopCounterMode(display=False) as counter:
        whole_logits(model, tokens, positions).sum().backward()
    assert counter.get_total_flops() == training_flops_per_token(variant(kind=kind, ffn=96)) * tokens.numel()


def test_of_block_sparse_attention_the_blocks_that_are_seen_count() -> None:
    """4 blocks: 8 of the 10 below the diagonal, 0.8 of what scores and their products with values take."""
    sparse = FixedSparsity("fixed", 6, 2, 1)
    per_layer, width = 3 * 4 * 24, 32
    whole, left = (training_flops_per_token(variant(sparse=pattern)) for pattern in (None, sparse))
    assert whole - left == pytest.approx(3 * 0.2 * per_layer * width, rel=1e-12)


def test_the_papers_formula() -> None:
    """72·L·d²·(1 + S/(6d) + V/(12·L·d)): 16.7, 79.2 and 1253.8 GFLOP per token."""
    for recipe, gflop in (("pangu_2_6b", 16.7), ("pangu_13b", 79.2), ("pangu_200b", 1253.8)):
        model = config(f"+config={recipe}").model
        d, layers = model.hidden, model.layers
        formula = 72 * layers * d * d * (1 + model.sequence / (6 * d) + model.vocab / (12 * layers * d))
        assert training_flops_per_token(model) == pytest.approx(formula, rel=1e-12)
        assert round(formula / 1e9, 1) == gflop
