"""Every shipped file composes, and what stands on the command line wins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pangu.config.optimizer import AdamConfig, LambConfig
from tests.configs import RECIPES, composed, config
from tests.spawn import repository

CONFIGS = repository() / "configs"
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONFIGS.iterdir()
    if folder.is_dir() and folder.name != "config"
}
"""Group -> its options."""


def test_the_presets_are_there() -> None:
    expected = {"quickstart", "pangu_350m", "pangu_2_6b", "pangu_13b", "pangu_200b", "gpt2_124m", "gpt3_175b"}
    assert expected <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_with_every_option_of_the_groups_that_it_changes(recipe: str) -> None:
    """Other groups stand in the configuration as their file does, whatever the recipe."""
    changed = {name: GROUPS[name] for name in OmegaConf.load(CONFIGS / "config" / f"{recipe}.yaml") if name in GROUPS}
    for options in every_option(changed):
        assert config(f"+config={recipe}", *options).train.output == f"runs/{recipe}"


def test_every_option_of_every_group_composes() -> None:
    for options in every_option(GROUPS):
        config(*options)


def every_option(groups: dict[str, list[str]]) -> Iterator[list[str]]:
    """The fewest command lines in which each option occurs: no group reads what another one says."""
    for turn in range(max(map(len, groups.values()))):
        yield [f"{group}={options[turn % len(options)]}" for group, options in groups.items()]


def test_overrides_win_over_recipes_and_groups() -> None:
    chosen = config(
        "+config=pangu_13b",
        "model=gpt2_124m",
        "optimizer=lamb",
        "precision=fp16",
        "optimizer.lr=7",
        "batch.micro_size=3",
    )
    assert chosen.model.kind == "gpt"
    assert chosen.model.layers == 12
    assert isinstance(chosen.optimizer, LambConfig)
    assert chosen.optimizer.lr == 7
    assert chosen.precision.loss_scale is not None
    assert chosen.batch.micro_size == 3
    # the order on the command line does not matter
    assert chosen == config(
        "optimizer.lr=7",
        "precision=fp16",
        "batch.micro_size=3",
        "optimizer=lamb",
        "model=gpt2_124m",
        "+config=pangu_13b",
    )


PUBLISHED = {
    # recipe: (lr, betas, weight decay, steps, tensor, pipeline, heads), report tables 1, 5, 6 and section 4.1
    "pangu_2_6b": (1e-4, (0.9, 0.999), 0.01, 70_000, 8, 1, 32),
    "pangu_13b": (5e-5, (0.9, 0.98), 0.01, 84_000, 8, 1, 40),
    "pangu_200b": (2e-5, (0.9, 0.95), 0.1, 260_000, 8, 16, 128),
    # Brown et al. 2020, table 2.1; where it contradicts itself, `gpt3_1_3b` has 16 heads
    "gpt3_125m": (6e-4, (0.9, 0.95), 0.1, 572_205, 1, 1, 12),
    "gpt3_350m": (3e-4, (0.9, 0.95), 0.1, 572_205, 1, 1, 16),
    "gpt3_760m": (2.5e-4, (0.9, 0.95), 0.1, 572_205, 1, 1, 16),
    "gpt3_1_3b": (2e-4, (0.9, 0.95), 0.1, 286_102, 1, 1, 16),
    "gpt3_2_7b": (1.6e-4, (0.9, 0.95), 0.1, 286_102, 1, 1, 32),
    "gpt3_6_7b": (1.2e-4, (0.9, 0.95), 0.1, 143_051, 1, 1, 32),
    "gpt3_13b": (1e-4, (0.9, 0.95), 0.1, 143_051, 8, 1, 40),
    "gpt3_175b": (6e-5, (0.9, 0.95), 0.1, 95_367, 8, 12, 96),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_values(recipe: str) -> None:
    chosen = config(f"+config={recipe}")
    assert isinstance(chosen.optimizer, AdamConfig)
    values = (
        chosen.optimizer.lr,
        chosen.optimizer.betas,
        chosen.optimizer.weight_decay,
        chosen.train.steps,
        chosen.parallel.tensor,
        chosen.parallel.pipeline,
        chosen.model.heads,
    )
    assert values == PUBLISHED[recipe]


def test_every_value_of_a_published_recipe_names_its_source() -> None:
    """Each value line of the large recipes ends in a source or in [ours]."""
    for recipe in [*PUBLISHED, "gpt2_124m"]:
        text = (CONFIGS / "config" / f"{recipe}.yaml").read_text(encoding="utf-8")
        body = text[text.index("\nparallel:") if "\nparallel:" in text else text.index("\nbatch:") :]
        for line in body.splitlines():
            if line.startswith("  ") and "data: null" not in line and "output:" not in line:
                assert "# [" in line, f"{recipe}: {line}"


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"+config={recipe}", "parallel.data=64", "optimizer.lr=1e-3") for recipe in RECIPES),
        ("model=gpt2_124m", "data=synthetic", "optimizer=lamb", "optimizer.clip=null", "memory.selective=[norm]"),
        ("precision=fp16", "precision.loss_scale.initial=256", "memory.offload=[activations]", "dry_run=true"),
    ],
    ids=str,
)
def test_tests_compose_as_the_command_does(overrides: tuple[str, ...]) -> None:
    """`composed` sets single values by itself, to be quick; all other tests rely on its being the same."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        whole = OmegaConf.to_container(compose("base", overrides=list(overrides)), resolve=True)
    assert composed(*overrides) == whole
