"""Random configurations, some of them hostile, made from the schema itself."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pangu.config.bounds import Bounds
from pangu.config.build import hints_of, options_of
from pangu.config.schema import RunConfig

OPTIONS = {
    "+config": ["quickstart", "pangu_350m", "gpt2_124m", "pangu_13b", "gpt3_175b"],
    "optimizer": ["adam", "lamb"],
    "lr_schedule": ["constant", "cosine", "linear", "wsd", "inverse_sqrt"],
    "precision": ["bf16", "fp16", "fp32", "fp64"],
    "data": ["stdlib", "indexed", "indexed_pangu", "synthetic"],
    "model": ["pangu_quickstart", "gpt2_124m", "pangu_2_6b"],
}
HOSTILE = (
    *("inf", "-inf", "nan", "0", "-1", "1", "2", "0.5", "1e-300", "1e22", "1e30", "1e400", "4000000000"),
    *(
        "100000000000000000000",
        "-9223372036854775808",
        "null",
        "true",
        "''",
        "' '",
        "x",
        "???",
        "[]",
        "[1,2]",
        "[null]",
    ),
    *("{}", "{a: 1}", "[{tensor: 2}]", "'${nope}'", "'${train}'", "'${train.output}'", "'\\\\u0007'", "é", "'a b'"),
)
INTEGERS = (1, 1, 2, 2, 3, 4, 5, 7, 8, 12, 16, 64, 100, 1000)


def words(source: random.Random) -> list[str]:
    """A command line of some choices and some values, most of the right type, a few not."""
    line = [f"{group}={source.choice(names)}" for group, names in OPTIONS.items() if source.random() < 0.3]
    leaves = list(_leaves(RunConfig, ""))
    for name, hint in source.sample(leaves, source.choice((0, 1, 2, 3, 5, 8))):
        value = source.choice(HOSTILE) if source.random() < 0.3 else sound(source, hint)
        misspelt = name[:-1] if source.random() < 0.03 else name
        line.append(f"{source.choice(('', '', '', '+', '++'))}{misspelt}={value}")
    return line


SMALL = {
    "train.device": "cpu",
    "train.steps": "1",
    "model.hidden": "16",
    "model.ffn": "32",
    "model.vocab": "600",
    "model.sequence": "16",
    "validation.every": "0",
    "sample.tokens": "0",
    "evaluate.every": "0",
    "checkpoint.resume": "auto",
    "checkpoint.init_from": "null",
    "metrics.wandb": "off",
    "parallel.timeout_s": "60",
    "dry_run": "false",
}
"""What keeps a run short and to itself."""


def small_words(source: random.Random) -> list[str]:
    """A command line of sound values for a run of one step of a small model."""
    model = [f"model={source.choice(('pangu_quickstart', 'gpt2_124m'))}", f"model.layers={source.choice((2, 4, 5))}"]
    shape = [f"model.heads={source.choice((2, 4))}", f"batch.global_size={source.choice((12, 24))}", "data=synthetic"]
    groups = ("optimizer", "lr_schedule", "precision")
    chosen = [f"{group}={source.choice(OPTIONS[group])}" for group in groups]
    micro = f"batch.micro_size={source.choice((1, 2))}"
    layout = [f"parallel.{key}={source.choice((1, 1, 2))}" for key in ("tensor", "pipeline")]
    fixed = {word.split("=")[0] for word in (*model, *shape, *chosen, *layout, micro)} | SMALL.keys()
    leaves = [leaf for leaf in _leaves(RunConfig, "") if leaf[0] not in fixed and not leaf[0].startswith("data.")]
    free = [f"{name}={sound(source, hint)}" for name, hint in source.sample(leaves, source.choice((2, 4, 6)))]
    return [*model, *shape, micro, *chosen, *layout, *free, *(f"{key}={value}" for key, value in SMALL.items())]


def sound(source: random.Random, hint: Any) -> str:
    """A value of the type that a field asks for, near its bounds or small."""
    option = source.choice(options_of(hint))
    bounds = Bounds()
    if get_origin(option) is Annotated:
        option, found = get_args(option)
        bounds = found if isinstance(found, Bounds) else bounds
    if option is type(None):
        return "null"
    if get_origin(option) is Literal:
        return str(source.choice(get_args(option)))
    if get_origin(option) is tuple:
        items = get_args(option)
        count = source.randrange(4) if items[-1] is Ellipsis else len(items)
        return f"[{','.join(sound(source, items[0]) for _ in range(count))}]"
    if get_origin(option) is dict:
        return source.choice(("{tensor: 2}", "{pipeline: 2, data: null}", "{zero: 1, bucket_mib: 0.5}", "{data: x}"))
    if option is bool:
        return source.choice(("true", "false"))
    if option is int:
        edges = [int(edge) for edge in (bounds.least, bounds.most) if edge is not None]
        return str(source.choice((*INTEGERS, *edges)))
    if option is float:
        return str(source.choice((1e-300, 1e-8, 1e-3, 0.1, 0.5, 0.9, 1, 1.5, 10, 1e4, 1e9, 3e38)))
    return source.choice(("auto", "none", "some/where", "1h30m", "'*.bias'", "'layers.0.*'", "hello"))


def _leaves(kind: type, path: str) -> Iterator[tuple[str, Any]]:
    for field, hint in hints_of(kind).items():
        groups = [option for option in options_of(hint) if dataclasses.is_dataclass(option)]
        if not groups:
            yield path + field, hint
        for group in groups:
            assert isinstance(group, type)
            yield from _leaves(group, f"{path}{field}.")
