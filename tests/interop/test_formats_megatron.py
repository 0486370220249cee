"""Megatron-Core's checkpoints in both formats and of any layout, and its options: used, harmless or refused by name.

The files come from tests/references/megatron_core_files.py, which shares nothing with the converter.
"""

from __future__ import annotations

import argparse
import enum
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from pangu.common.errors import UserError
from pangu.config.build import build
from pangu.config.model import ModelConfig
from pangu.config.rope import LinearScaling, YarnScaling
from pangu.interop.formats.convert import FORMATS, fitting_tensors, settle_model
from pangu.interop.formats.stored import take
from pangu.models.parameters import logical_shapes
from pangu.training.command import compose
from tests.interop.test_formats import Attack, convert, logical, require_equal
from tests.references import megatron_core_files as foreign
from tests.spawn import repository
from tools.convert_checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BOTH = pytest.mark.parametrize("llama", [False, True])


@pytest.fixture(scope="module")
def given() -> ModelConfig:
    """A model that says nothing of the files'."""
    return build(ModelConfig, compose(repository() / "configs", ["model=gpt2_124m", "data=synthetic"])["model"])


def read(folder: Path, given: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model and the logical tensors of a folder."""
    source = FORMATS["megatron"].open(folder)
    model = settle_model(source.model_keys, given, set())
    table = source.table(model)
    fitting_tensors(source, table)
    shapes = logical_shapes(model)
    return model, {part: take(stored, source.read(stored), part, shapes) for stored in table for part in stored.parts}


def refusal(folder: Path, given: ModelConfig) -> str:
    with pytest.raises(UserError) as error:
        read(folder, given)
    assert str(error.value).replace("\n", "").isprintable()
    return str(error.value)


def expect(llama: bool, model: ModelConfig) -> None:
    """The facts that only the options tell."""
    assert (model.kind, model.layers, model.hidden, model.heads, model.vocab) == ("gpt", 4, 16, 4, 64)
    if llama:
        assert (model.activation, model.kv_heads, model.ffn, model.norm_eps) == ("swiglu", 2, 24, 1e-6)
        assert (model.positions, model.rope_base, model.tied_head, model.biases) == ("rope", 500.0, False, False)
    else:
        assert (model.activation, model.sequence, model.tied_head) == ("gelu_tanh", foreign.LENGTH, True)


@BOTH
@pytest.mark.parametrize(("tensor", "pipeline", "virtual"), [(2, 1, 1), (1, 4, 1), (2, 2, 2), (4, 1, 1)])
def test_files_of_ranks_and_stages(
    llama: bool, tensor: int, pipeline: int, virtual: int, tmp_path: Path, given: ModelConfig
) -> None:
    expected = foreign.weights(llama)
    whole = foreign.whole_tensors(expected, llama)
    # paths, signals and enumerations among the options say nothing of the model
    more = {"data_cache_path": Path("cache"), "exit_signal": signal.SIGTERM, "wandb_entity": "us", "seed": 1}
    foreign.write_ranks(tmp_path, whole, llama, tensor, pipeline, virtual, **more)
    model, found = read(tmp_path, given)
    expect(llama, model)
    require_equal(found, expected)


def test_files_of_ranks_that_share_key_heads_are_written(tmp_path: Path) -> None:
    """Four ranks, two key heads: each has half of a group of queries, key and value, whose rows lie together."""
    whole = foreign.whole_tensors(foreign.weights(True), True)
    foreign.write_ranks(tmp_path / "in", whole, True, 1, 1, 1)
    out = convert("megatron", "megatron", tmp_path / "in", tmp_path / "out", "--tensor", "4")
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    for rank in range(4):
        file = out / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        found = torch.load(file, weights_only=False)["model"][name]
        assert torch.equal(found, foreign.cut(name, whole[name], rank, 4, llama=True))
    require_equal(logical(convert("megatron", "pangu", out, tmp_path / "back")), foreign.weights(True))


def test_stages_that_are_missing_or_overlap(tmp_path: Path, given: ModelConfig) -> None:
    whole = foreign.whole_tensors(foreign.weights(True), True)
    foreign.write_ranks(tmp_path, whole, True, 1, 4, 1)
    file = tmp_path / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    kept = file.read_bytes()
    state = torch.load(file, weights_only=False)
    state["model"]["embedding.word_embeddings.weight"] = torch.zeros(2, 2)
    torch.save(state, file)
    assert "embedding.word_embeddings.weight is in an earlier pipeline stage as well" in refusal(tmp_path, given)
    file.write_bytes(kept)
    state["model0"] = state["model1"] = {}
    torch.save(state, file)
    assert "has a different number of virtual stages" in refusal(tmp_path, given)
    file.unlink()
    assert "mp_rank_00_001: no model_optim_rng.pt here; 1 tensor-parallel ranks and 4 pipeline stages" in refusal(
        tmp_path, given
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\0\x1b[2J\xff")
    assert "there is no folder release" in refusal(tmp_path, given)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of a Llama with some options changed."""
    folder = tmp_path_factory.mktemp("options")
    whole = foreign.whole_tensors(foreign.weights(True), True)
    foreign.write_ranks(folder, whole, True, 1, 1, 1)

    def changed(**options: Any) -> Path:
        file = folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
        namespace = argparse.Namespace(**(foreign.LLAMA | options))
        torch.save({"args": namespace, "model": whole}, file)
        return folder

    return changed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("squared_relu", True),
        ("quick_geglu", True),
        ("rotary_seq_len_interpolation_factor", 0.5),
        ("rotary_percent", 1.5),
        ("position_embedding_type", "none"),
        ("position_embedding_type", "relative"),
        ("no_rope_freq", [0, 1]),
        ("softmax_scale", 0.1),
        ("kv_channels", 8),
        ("multi_latent_attention", True),
        ("num_experts", 8),
        ("my_own_option", 1),
        ("logits_softcap", 30.0),
        ("linear_scale", 2.0),
        ("decoder_scale", 2.0),
        ("num_layers", 10**6),
        ("num_attention_heads", "4\x1b[2J"),
        ("num_attention_heads", 10**400),
        ("norm_epsilon", float("nan")),
        ("norm_epsilon", torch.ones(2)),
        ("swiglu", False),
        ("normalization", "LayerNorm"),
        ("num_query_groups", 4),
        ("untie_embeddings_and_output_weights", False),
        ("tensor_model_parallel_size", 2),
    ],
)
def test_options_that_change_the_function_are_refused(
    option: str, value: object, small: Callable[..., Path], given: ModelConfig
) -> None:
    assert f"  {option} = " in refusal(small(**{option: value}), given)


def test_more_heads_than_the_tensors_hold_are_refused(small: Callable[..., Path], given: ModelConfig) -> None:
    assert "the tensors do not have the shapes" in refusal(small(num_attention_heads=40), given)


def test_what_yarn_computes_otherwise_is_refused(small: Callable[..., Path], given: ModelConfig) -> None:
    for option, value in {"mscale": 0.7, "mscale_all_dim": 1.0, "rotary_percent": 0.5, "yarn_mscale": 2.0}.items():
        assert f"  {option} = " in refusal(small(position_embedding_type="yarn", **{option: value}), given)
    both = {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}
    assert "is not supported with use_rope_scaling" in refusal(small(**both), given)


def test_options_of_rotation_are_read(small: Callable[..., Path], given: ModelConfig) -> None:
    """With the defaults of Megatron's `YarnRotaryEmbedding` where an option is null."""
    assert read(small(rotary_percent=0.5), given)[0].partial_rotary_factor == 0.5
    found = read(small(rotary_seq_len_interpolation_factor=4), given)[0]
    assert found.rope_scaling == LinearScaling(name="linear", factor=4.0)
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_beta_fast": 16.0, "mscale": 1.0}
    found = read(small(**yarn, yarn_beta_slow=None, yarn_correction_range_round_to_int=False), given)[0]
    scaling = YarnScaling(name="yarn", factor=4.0, original_sequence=4096, beta_fast=16.0, truncate=False)
    assert found.rope_scaling == scaling


@pytest.mark.parametrize("options", [{"squared_relu": True}, SimpleNamespace(squared_relu=True), ["--squared-relu"]])
def test_options_in_another_object_are_not_passed_over(options: object, tmp_path: Path, given: ModelConfig) -> None:
    whole = foreign.whole_tensors(foreign.weights(True), True)
    foreign.write_ranks(tmp_path, whole, True, 1, 1, 1)
    torch.save({"args": options, "model": whole}, tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    assert "args = " in refusal(tmp_path, given)


def test_a_tensor_under_both_of_its_names(tmp_path: Path, given: ModelConfig) -> None:
    """Norms are fused with what follows them, or not: one of the two was taken."""
    whole = foreign.whole_tensors(foreign.weights(True), True)
    foreign.write_ranks(tmp_path, whole | {"decoder.layers.0.input_layernorm.weight": torch.ones(16)}, True, 1, 1, 1)
    assert "decoder.layers.0.input_layernorm.weight is in the file more than once" in refusal(tmp_path, given)


def test_options_that_say_what_we_compute(small: Callable[..., Path], given: ModelConfig) -> None:
    """Epsilon goes by two names; what is written for the rest of Megatron's versions changes nothing."""
    same = {"softmax_scale": 0.5, "kv_channels": 4, "num_layers": 4, "rope_type": "rope", "hidden_size": 16}
    assert read(small(**same, moe_layer_freq=[1, 0]), given)[0].norm_eps == 1e-6
    assert read(small(layernorm_epsilon=3e-6), given)[0].norm_eps == 3e-6
    assert read(small(max_position_embeddings=77, vocab_size=60), given)[0].sequence == 77


@BOTH
@pytest.mark.parametrize("chunks", [False, True])
def test_torch_dist(llama: bool, chunks: bool, tmp_path: Path, given: ModelConfig) -> None:
    """Stacked layers, in one piece each or in the chunks that ranks write."""
    expected = foreign.weights(llama)
    tensors = foreign.stacked(foreign.whole_tensors(expected, llama))
    optimizer = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    foreign.write_dist(
        tmp_path, tensors | optimizer if not chunks else tensors, foreign.LLAMA if llama else foreign.GPT, chunks
    )
    model, found = read(tmp_path, given)
    expect(llama, model)
    require_equal(found, expected)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mtp.layers.0.eh_proj.weight": (3, 3)}, "mtp.layers.0.eh_proj.weight: [3, 3], not in the model"),
        ({"final_scale": (16,)}, "final_scale: [16], not in the model"),
        ({"model.decoder.layers.mlp.linear_fc2.weight": (4, 16, 24)}, "is in the files more than once"),
        ({"decoder.layers.mlp.linear_fc1.weight_w": (4, 48, 16)}, "is in the files more than once"),
        ({"decoder.layers.x.weight": (10**6, 1)}, "has 1000000 layers; the limit is 1000"),
    ],
    ids=str,
)
def test_tensors_that_no_model_has(
    more: dict[str, tuple[int, ...]], words: str, tmp_path: Path, given: ModelConfig
) -> None:
    """None is passed over, none is taken for another one, and a small file does not make a million names."""
    tensors = foreign.stacked(foreign.whole_tensors(foreign.weights(True), True))
    foreign.write_dist(tmp_path, tensors | {name: torch.zeros(shape) for name, shape in more.items()}, foreign.LLAMA)
    assert words in refusal(tmp_path, given)


def test_torch_dist_with_numbered_layers(tmp_path: Path, given: ModelConfig) -> None:
    """Newer versions number the layers and store gate and up apart."""
    expected = foreign.weights(True)
    tensors = {}
    for name, tensor in foreign.whole_tensors(expected, True).items():
        if "linear_fc1.weight" in name:
            tensors[f"{name}_v"], tensors[f"{name}_w"] = tensor.chunk(2)[1].clone(), tensor.chunk(2)[0].clone()
        else:
            tensors[f"module.{name}"] = tensor
    foreign.write_dist(tmp_path, tensors, foreign.LLAMA)
    require_equal(read(tmp_path, given)[1], expected)


@BOTH
def test_torch_dist_is_written(llama: bool, tmp_path: Path) -> None:
    """torch's own loader finds Megatron's stacked names; the way back is exact."""
    expected = foreign.weights(llama)
    tensors = foreign.stacked(foreign.whole_tensors(expected, llama))
    foreign.write_dist(tmp_path / "in", tensors, foreign.LLAMA if llama else foreign.GPT)
    out = convert("megatron", "megatron", tmp_path / "in", tmp_path / "out", "--megatron-format", "torch_dist")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    rows = {
        name: torch.Size((128, foreign.HIDDEN)) for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    found = {name: torch.empty(rows.get(name, tensor.shape)) for name, tensor in tensors.items()}
    load(found, storage_reader=FileSystemReader(out / "release"), no_dist=True)
    require_equal({name: tensor[: len(tensors[name])] for name, tensor in found.items()}, tensors)
    common = torch.load(out / "release" / "common.pt", weights_only=False)
    assert common["args"].bias_gelu_fusion is not llama
    assert common["args"].norm_epsilon == (1e-6 if llama else 1e-5)
    require_equal(logical(convert("megatron", "pangu", out, tmp_path / "back")), expected)


def test_what_torch_dist_cannot_express(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--to", "pangu", "--megatron-format", "torch_dist"], "needs --to megatron"),
        (["--to", "megatron", "--megatron-format", "torch_dist", "--tensor", "2"], "--tensor 2: must be 1"),
    ):
        assert main(["--from", "pangu", "--input", str(tmp_path), "--output", str(tmp_path / "out"), *words]) == 2
        assert said in capsys.readouterr().err


class Colour(enum.Enum):
    """An enumeration of a program that is not Megatron."""

    RED = 1


def test_damaged_and_hostile_torch_dist(tmp_path: Path, given: ModelConfig) -> None:
    """One message each, and nothing in the files is run."""
    tensors = foreign.stacked(foreign.whole_tensors(foreign.weights(True), True))
    foreign.write_dist(tmp_path, tensors, foreign.LLAMA, chunks=True)
    metadata, data = tmp_path / ".metadata", tmp_path / "__0_0.distcp"
    kept, bytes_ = metadata.read_bytes(), data.read_bytes()

    def altered(change: Callable[[Any], object]) -> str:
        found = pickle.loads(kept)
        change(found)
        metadata.write_bytes(pickle.dumps(found))
        said = refusal(tmp_path, given)
        metadata.write_bytes(kept)
        return said

    first = "output_layer.weight"

    def chunk(found: Any) -> Any:
        return found.state_dict_metadata[first].chunks[0]

    def stored(found: Any, **values: object) -> None:
        for index, info in found.storage_data.items():
            if index.fqn == first:
                for key, value in values.items():
                    object.__setattr__(info, key, value)

    def share(found: Any) -> None:
        one, other = (index for index in found.storage_data if index.fqn == first)
        found.storage_data[one] = found.storage_data[other]

    huge = torch.Size((2**40, 2**40))
    for words, change in (
        ("holds posix.mkdir", lambda found: setattr(found, "planner_data", Attack(tmp_path / "attacked"))),
        ("holds tests.interop.test_formats_megatron.Colour", lambda found: setattr(found, "version", Colour.RED)),
        ("do not cover the tensor", lambda found: found.state_dict_metadata[first].chunks.pop()),
        ("the location of the chunk", lambda found: setattr(chunk(found), "offsets", torch.Size((1, 0)))),
        ("is too short for", lambda found: setattr(chunk(found), "sizes", huge)),
        ("do not cover the tensor", lambda found: setattr(found.state_dict_metadata[first], "size", huge)),
        ("is not the metadata of", lambda found: setattr(found, "storage_data", None)),
        ("is not the metadata of", lambda found: setattr(chunk(found), "sizes", [[]])),
        ("is stored by [zstd\\x1b]", lambda found: stored(found, transform_descriptors=["zstd\x1b"])),
        ("is not the name of a file", lambda found: stored(found, relative_path="../__0_0.distcp")),
        ("is not the name of a file", lambda found: stored(found, relative_path="a\0b")),
        ("__1_0.distcp: is missing", lambda found: stored(found, relative_path="__1_0.distcp")),
        ("is too short for", lambda found: stored(found, length=10)),
        ("__0_0.distcp: ", lambda found: stored(found, offset=1)),
        ("two chunks of tensors overlap", share),
    ):
        assert words in altered(change), words
    assert not (tmp_path / "attacked").exists()
    for content in (b"", b"\0" * 100, kept[: len(kept) // 2], b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN."):
        metadata.write_bytes(content)
        assert str(metadata) in refusal(tmp_path, given)
    metadata.write_bytes(kept)
    data.write_bytes(b"\0" * len(bytes_))
    assert "is not a file of torch.save" in refusal(tmp_path, given)
    data.write_bytes(bytes_)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "sharded_backend = zarr: is not supported; use torch_dist" in refusal(tmp_path, given)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}')
    assert "sharded_backend_version = 2: is not supported; use 1" in refusal(tmp_path, given)
    (tmp_path / "metadata.json").unlink()
    torch.save({"args": {**foreign.LLAMA, "squared_relu": True}}, tmp_path / "common.pt")
    assert "common.pt: args = dict: must be Megatron" in refusal(tmp_path, given)
