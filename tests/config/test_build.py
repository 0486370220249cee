"""Dictionaries become frozen dataclasses, or one error that names everything that is wrong."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
from typing import Any

import pytest

from pangu.common.errors import ConfigError, shown
from pangu.config import schema
from pangu.config.build import build, keys_of
from pangu.config.data import StdlibData
from pangu.config.model import ModelConfig
from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.config.schema import RunConfig
from tests.configs import composed, tiny

VALUES = composed("+config=quickstart")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The quickstart's values with one of them replaced."""
    values = copy.deepcopy(VALUES)
    *groups, last = path.split(".")
    inner = values
    for group in groups:
        inner = inner[group]
    inner[last] = value
    return values


def message(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, values)
    return str(caught.value)


def test_quickstart() -> None:
    config = build(RunConfig, VALUES)
    assert isinstance(config.optimizer, AdamConfig)
    assert isinstance(config.data, StdlibData)
    assert config.optimizer.betas == (0.9, 0.95)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3


def test_run_folders_older_than_a_key_are_read() -> None:
    """They computed what the key's default says; a key without a default has to be there."""
    model = composed()["model"]
    for key in ("head_dim", "qk_norm", "rope_scaling", "sparse"):
        del model[key]
    assert build(ModelConfig, model) == build(ModelConfig, composed()["model"])
    del model["heads"]
    with pytest.raises(ConfigError, match=r"heads = \(missing\)"):
        build(ModelConfig, model)


def test_the_tag_chooses_the_class() -> None:
    config = build(RunConfig, composed("optimizer=lamb"))
    assert isinstance(config.optimizer, LambConfig)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.layres", 3, "model.layres = 3: unknown key; did you mean model.layers?"),
        ("zzz", 1, "zzz = 1: unknown key; known keys: model, parallel,"),
        ("model.layers", "many", "model.layers = 'many': must be an integer"),
        ("model.layers", 2.5, "model.layers = 2.5: must be an integer"),
        ("model.layers", True, "model.layers = true: must be an integer"),
        ("model.layers", None, "model.layers = null: must be an integer"),
        ("model.layers", "???", "model.layers = (missing): is required: an integer"),
        ("model.kind", "bert", "model.kind = 'bert': must be pangu or gpt"),
        ("model.ffn", "x", "model.ffn = 'x': must be an integer or null"),
        ("model.dropout", "much", "model.dropout = 'much': must be a number"),
        ("model", 3, "model = 3: must be a group of keys"),
        ("memory.recompute", "some", "memory.recompute = 'some': must be none, selective, full or an integer"),
        ("memory.offload", ["all"], "memory.offload[0] = 'all': must be activations"),
        ("dry_run", "perhaps", "dry_run = 'perhaps': must be true, false or all"),
        ("optimizer.betas", [0.9], "optimizer.betas = [0.9]: must be a list of 2 numbers"),
        ("optimizer.betas", [0.9, "b"], "optimizer.betas[1] = 'b': must be a number"),
        ("optimizer.name", "sgd", "optimizer.name = 'sgd': must be adam, lamb or muon"),
        ("sample.prompts", "x", "sample.prompts = 'x': must be a list of strings"),
        ("parallel.zero", 4, "parallel.zero = 4: must be 0, 1, 2 or 3"),
    ],
)
def test_one_problem(path: str, value: Any, expected: str) -> None:
    text = message(changed(path, value))
    assert text.startswith("1 problem in the configuration:\n  ")
    assert expected in text


def test_all_problems_at_once() -> None:
    values = changed("model.layres", 3)
    values["batch"]["micro_size"] = "x"
    del values["train"]["seed"]
    text = message(values)
    assert text.startswith("3 problems")
    assert all(key in text for key in ("model.layres", "batch.micro_size", "train.seed"))


def test_numbers_as_yaml_reads_them() -> None:
    assert build(RunConfig, changed("optimizer.lr", "1e-4")).optimizer.lr == 1e-4
    assert build(RunConfig, changed("train.steps", 100.0)).train.steps == 100


def test_every_field_has_a_docstring() -> None:
    """A text under the field, as editors show it."""
    tree = ast.parse(inspect.getsource(schema))
    bare = [
        f"{node.name}.{statement.target.id}"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
    ]
    assert bare == []
    assert len(list(keys_of(RunConfig))) > 60


def test_values_are_shown_without_control_characters_and_not_at_any_length() -> None:
    assert shown("模型\u3000一\x1b[2J\n") == "模型\u3000一\\x1b[2J\\n"
    assert shown([None, True, "a", {"b": False}]) == "[null, true, a, {b: false}]"
    assert len(shown(list(range(1000)))) == 203
    assert "must not contain control characters" in message(changed("train.output", "a\x07"))
    assert build(RunConfig, changed("train.output", "模型\u3000一")).train.output == "模型\u3000一"


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ("model.vocab=1024 batch.micro_size=8", None),
        ("model.vocab=3264 batch.micro_size=8", 4096),
        ("model.vocab=3264 batch.micro_size=1", None),
        ("model.vocab=3264 batch.micro_size=3", 1536),
        ("model.vocab=6528 batch.micro_size=8", 2048),
        ("model.vocab=65280 batch.micro_size=8", 1024),
        ("model.vocab=3264 batch.micro_size=4 parallel.context=2", 1024),
        ("model.vocab=65280 batch.micro_size=1 loss.chunk=7", 7),
    ],
)
def test_the_loss_is_cut_where_words_are_many_beside_the_width(keys: str, tokens: int | None) -> None:
    """In halves, of 1,024 tokens at least."""
    shape = ("model.sequence=1024", "model.hidden=96", "model.heads=4", "loss.chunk=auto")
    assert tiny(*shape, *keys.split(), "batch.global_size=24").loss_chunk == tokens
