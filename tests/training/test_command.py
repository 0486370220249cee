"""What a command line composes to, and what is said of one that cannot be read."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from pangu.common.errors import ConfigError, UserError
from pangu.pipeline.layouts import choose_layout
from pangu.report.clusters import cluster_names, load_cluster
from pangu.training.command import check_sweeper, compose, final_loss, given_keys, run_command
from tests.end_to_end.commands import called
from tests.spawn import repository


def said(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        choose_layout(compose(repository() / "configs", words), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("\N{FULLWIDTH PLUS SIGN}config=quickstart", "+config=quickstart"),
        ("train.steps\N{FULLWIDTH EQUALS SIGN}3", "train.steps=3"),
        ("+config=quickstart\N{FULLWIDTH COMMA}train.steps=3", "+config=quickstart train.steps=3"),
        ("train.output=a\N{FULLWIDTH COMMA}b", "'train.output=\"a\N{FULLWIDTH COMMA}b\"'"),
    ],
)
def test_full_width_characters_of_an_input_method_are_named_as_what_is_meant(word: str, meant: str) -> None:
    assert said(word).endswith(f"with quotes around special characters; write {meant}")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer=null", "optimizer = null: must be the name of an option; use one of adam, lamb"),
        ("optimizer=sgd", "optimizer = sgd: unknown option; use one of adam, lamb"),
        ("~optimizer", "optimizer = (missing): is required: a group of keys"),
        ("train.output='${nope}'", "train.output = ${nope}: cannot be resolved: Interpolation key 'nope' not found"),
        ("train.output='${train.output}'", "train.output = ${train.output}: cannot be resolved: Recursive"),
        ("data.train=[a]", "data.train = [a]: does not exist with data.kind = stdlib; set data=indexed"),
        ("model.layers.x=3", "model.layers = {x: 3}: must be an integer"),
        ("dry_run=maybe", "dry_run = 'maybe': must be true, false or all"),
        (f"train.stop_after={'9' * 400}h", "must be a duration; use e.g. 5400, 90m, 1h30m or null"),
        (
            "train.output='/tmp/\udcd6\udcd0'",
            r"train.output = /tmp/\udcd6\udcd0: must be valid UTF-8; rename",
        ),
        ("sample.prompts=['\udcd6']", r"sample.prompts[0] = \udcd6: must be valid UTF-8"),
        ("=3", "=3: cannot be read: use KEY=VALUE, GROUP=OPTION or +config=RECIPE"),
    ],
)
def test_one_message(word: str, expected: str) -> None:
    assert expected in said(word)


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("sample.prompts=[你好,abc]", 'sample.prompts=["你好",abc]'),
        ("train.output=运行/一", 'train.output="运行/一"'),
        ("train.output=a=b", 'train.output="a=b"'),
        ("data.train=[/data/day=1,/data/b]", 'data.train=["/data/day=1",/data/b]'),
        ("data.tokenizer={kind:bytes,path:/数据}", 'data.tokenizer={kind:bytes,path:"/数据"}'),
        ('sample.prompts=[你"好]', 'sample.prompts=["你\\"好"]'),
    ],
)
def test_what_cannot_be_read_is_told_with_the_word_that_works(word: str, works: str) -> None:
    assert said(word).endswith(f"with quotes around special characters; write {shlex.quote(works)}")
    value = OverridesParser.create().parse_override(works).value()
    plain = word.partition("=")[2].strip("[]").split(",")
    assert value in (plain, plain[0], {"kind": "bytes", "path": "/数据"})


@pytest.mark.parametrize(
    ("words", "works"),
    [
        ("+config pangu_13b", "write +config=pangu_13b"),
        ("quickstart", "write +config=quickstart"),
        ("train.steps = 3", "write train.steps=3"),
        ("train.steps =3", "write train.steps=3"),
        ("train.steps 3", "write train.steps=3"),
        ("sample.prompts=[a b] train.steps=3", "write 'sample.prompts=[a b]'"),
        ("faults={spike: null, action: stop} train.steps=3", "write 'faults={spike: null, action: stop}'"),
        ("train.output=a,b", "use 'train.output=[a,b]' for a list, 'train.output=\"a,b\"' for one string"),
    ],
)
def test_words_without_a_value_and_values_without_brackets_are_told_with_what_works(words: str, works: str) -> None:
    assert said(*words.split()).endswith(works)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--nnodes 2",
            [("--nnodes: use the launcher: python scripts/launch.py --nnodes=2 pretrain.py ...")],
        ),
        ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size: did you mean parallel.tensor=2?"]),
        (
            "--lr=1e-4 --bf16 --nonsense --micro-batch-size 4",
            [
                "--lr: did you mean optimizer.lr=1e-4?",
                "--bf16: did you mean precision=bf16?",
                "--nonsense: unknown",
                "--micro-batch-size: did you mean batch.micro_size=4?",
            ],
        ),
        ("--config quickstart --multirun", ["--config: did you mean +config=quickstart?"]),
    ],
)
def test_options_of_other_programs_are_told_with_our_keys(words: str, expected: list[str]) -> None:
    done = called("pretrain", *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith("pretrain.py: error: unknown option: set values as KEY=VALUE")
    assert [line.strip() for line in done.stderr.splitlines()[1:]] == expected


def test_a_sweeper_that_chooses_needs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own runs lists of values, which all processes have in the same order."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    check_sweeper("basic")
    with pytest.raises(UserError, match="hydra/sweeper=optuna: each process would choose other values; start it on"):
        check_sweeper("optuna")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("parallel.dp", "parallel.data"),
        ("parallel.tp", "parallel.tensor"),
        ("parallel.zero_stage", "parallel.zero"),
        ("model.num_layers", "model.layers"),
        ("model.num_key_value_heads", "model.kv_heads"),
        ("model.intermediate_size", "model.ffn"),
        ("steps", "train.steps"),
    ],
)
def test_short_names_of_the_field_are_told_with_our_keys(key: str, meant: str) -> None:
    assert f"{key} = 2: unknown key; did you mean {meant}" in said(f"{key}=2")


def test_options_of_groups_can_be_files_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, configs = tmp_path / "my 集群 (1)", repository() / "configs"
    folder.mkdir()
    (folder / "h100.yaml").write_text("defaults: [h100, _self_]\nname: mine\ndevices: 64\n", encoding="utf-8")
    (tmp_path / "small.yaml").write_text("defaults: [gpt2_124m, _self_]\nlayers: 2\n", encoding="utf-8")
    recipe = "# @package _global_\ndefaults: [quickstart, {override /model: gpt2_124m}, _self_]\ntrain: {steps: 7}\n"
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shipped = compose(configs, ["cluster=h100"])["cluster"]
    for path in (f"{folder.name}/h100.yaml", f"{folder}/h100.yaml"):
        values = compose(configs, [f'cluster="{path}"', "config=recipe.yaml", "model=./small.yaml"])
        assert values["cluster"] == {**shipped, "name": "mine", "devices": 64}
        assert (values["model"]["layers"], values["model"]["hidden"], values["train"]["steps"]) == (2, 768, 7)
    for word in ("cluster=recipe2.yaml", f"cluster={tmp_path}/recipe2.yaml"):
        with pytest.raises(ConfigError, match=r"recipe2\.yaml: no such file; use one of a100, .*, or a file: cluster="):
            compose(configs, [word])
    with pytest.raises(ConfigError, match=r"cluster = small: unknown option; .*, or a file: cluster=PATH\.yaml"):
        compose(configs, ["cluster=small"])


@pytest.mark.parametrize(
    "name",
    [
        "a,b.yaml",
        "[x].yaml",
        "a=b (1).yaml",
        "~集群.yaml",
        "it's.yaml",
        'q"q.yaml',
        "C:\\x\\.yaml",
        "v1.yaml.yaml",
        "${b}.yaml",
        "\\${b}.yaml",
    ],
)
def test_a_file_that_exists_needs_no_quotes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blob").write_text("defaults: [h100, _self_]\ndevices: 64\n", encoding="utf-8")
    Path(name).symlink_to("blob")
    for path in (name, f"{tmp_path}/{name}"):
        assert compose(repository() / "configs", [f"cluster={path}"])["cluster"]["devices"] == 64
        assert given_keys([f"cluster={path}", "memory={recompute: full}"]) == {"cluster", "memory.recompute"}


def test_files_in_values_of_keys_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    values = compose(repository() / "configs", ["data={train: [a.yaml, 'a.yaml']}", "train.output=a.yaml"])
    assert (values["data"]["train"], values["train"]["output"]) == (["a.yaml", "a.yaml"], "a.yaml")


def test_words_that_name_no_file_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = repository() / "configs"
    monkeypatch.chdir(tmp_path)
    Path("self.yaml").write_text(f"defaults: [{os.path.relpath(tmp_path / 'self', configs / 'cluster')}]\n")
    Path("folder.yaml").mkdir()
    os.mkfifo("pipe.yaml")
    for word, message in {
        "cluster=h100,a100": "several values; use one, or pretrain.py --multirun for a run with each$",
        "cluster": "^cluster: cannot be read: use KEY=VALUE",
        # in folders that are less deep than tests' files, the path of the second inclusion names no file
        "cluster=self.yaml": "cannot be read from .*: .*File name too long|self: unknown option",
        "cluster=folder.yaml": "cluster = folder.yaml: no such file",
        "cluster=pipe.yaml": "cluster = pipe.yaml: no such file",
        f"cluster={'x' * 300}.yaml": "x: no such file|xx\\.\\.\\.: no such file",
        f"{'x' * 300}=1": "File name too long",
        "hydra/launcher=foo": "hydra/launcher = foo: unknown option; use one of basic$",
    }.items():
        with pytest.raises(UserError, match=message):
            compose(configs, [word])


def test_a_sweep_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, name in ((8, "8.yaml"), (16, "a, b.yaml")):
        (tmp_path / name).write_text(f"defaults: [h100, _self_]\ndevices: {devices}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["pretrain.py", "--multirun", "cluster=8.yaml,'a, b.yaml',a100", "hydra.sweep.dir=out"]
    )
    seen = list[Any]()
    run_command(repository() / "configs", lambda values, _: seen.append(values["cluster"]))
    assert [(cluster["name"], cluster["devices"]) for cluster in seen[:2]] == [("h100", 8), ("h100", 16)]
    assert seen[2] == compose(repository() / "configs", ["cluster=a100"])["cluster"]
    Path("c (1) ${b}.yaml").symlink_to("8.yaml")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--multirun", "cluster=c (1) ${b}.yaml", "hydra.sweep.dir=out"])
    run_command(repository() / "configs", lambda values, _: seen.append(values["cluster"]))
    assert seen[3] == seen[0]


def test_an_error_of_a_run_in_a_sweep_is_not_one_of_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--multirun", f"hydra.sweep.dir={tmp_path}"])
    with pytest.raises(SystemExit, match="1"):
        run_command(repository() / "configs", train)
    written = capsys.readouterr().err
    assert written.startswith("Traceback"), written
    assert written.endswith("ValueError: a bug\n"), written


@pytest.mark.parametrize("content", ["a: &a [*a]", "a: [", "\udcff"])
def test_a_file_that_is_no_yaml_is_one_message(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "base.yaml").write_text("a: 1\n", encoding="utf-8")
    path = tmp_path / "cluster" / "mine.yaml"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # Hydra's own default, which the command changes
    with pytest.raises(UserError, match=f"cannot be read from {tmp_path} and the command line: ."):
        compose(tmp_path, ["+cluster=mine"])
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--multirun", "+cluster=mine", f"hydra.sweep.dir={tmp_path}"])
    with pytest.raises(SystemExit, match="2"):
        run_command(tmp_path, lambda values, _: None)
    lines = capsys.readouterr().err.splitlines()
    assert [f"cannot be read from {tmp_path} and the command line: " in line for line in lines] == [True]
    # a file that refers to itself is YAML, and Hydra alone refuses it
    with pytest.raises(UserError, match=f"{path}: cannot be read as a cluster file: .|a = .*: unknown key"):
        load_cluster(path)
    path.unlink()
    path.mkdir()
    assert cluster_names(tmp_path / "cluster") == []


@pytest.mark.parametrize("name", ["pretrain", "tools/plan"])
def test_a_group_that_is_left_out_is_one_message(name: str) -> None:
    done = called(name, "+config=quickstart", "~cluster", "~dry_run", "~parallel")
    assert done.returncode == 2
    assert "parallel = (missing): is required" in done.stderr


def test_a_mistyped_key_is_told_with_all_other_problems() -> None:
    words = ("model.layer=3", "model.heads=7", "model.positions=learned", "+train.step=9", "parallel.schedule=zb_v")
    text = said(*words)
    assert text.splitlines() == [
        "4 problems in the configuration:",
        "  model.layer = 3: unknown key; did you mean model.layers?",
        "  train.step = 9: unknown key; did you mean train.steps?",
        "  model.heads = 7: must divide model.hidden = 96; nearest valid values: 4, 6, 8",
        "  parallel.virtual_stages = 1: zb_v needs exactly 2 chunks per stage; use 2",
    ]


def test_the_composed_configuration_is_shown_unless_it_has_keys_that_are_none() -> None:
    shown = called("pretrain", "--cfg", "job", "+config=quickstart", "model.layers=3", "data.folder='${train.output}'")
    assert shown.returncode == 0, shown.stderr
    values = yaml.safe_load(shown.stdout)
    assert values["model"]["layers"] == 3
    assert values["data"]["folder"] == values["train"]["output"]
    assert "  output: job\n" in called("pretrain", "-c", "job", "train.output=job").stdout
    for word in ("model.layer=3", "+model.layer=3"):
        refused = called("pretrain", word, "--cfg", "job")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "model.layer = 3: unknown key; did you mean model.layers?" in refused.stderr


def test_a_list_of_layouts_may_hold_null_lists_and_fractions() -> None:
    word = "parallel.layouts=[{data: null, layers: [4], bucket_mib: 0.5}]"
    assert choose_layout(compose(repository() / "configs", [word]), 1).config.parallel.layers == (4,)
    assert choose_layout(compose(repository() / "configs", ["parallel.layouts=null"]), 1).layout.world == 1
    text = said("parallel.layouts=[{tensor: 1},{tensor: 2.5},{schedule: [a]}]")
    assert text.startswith("2 problems")
    assert "parallel.layouts[1].tensor = 2.5: must be an integer" in text
    assert "parallel.layouts[2].schedule = [a]: must be gpipe" in text


def sample(prompt: str) -> Any:
    words = ["+config=quickstart", f"sample.prompts=[{prompt}]", f"train.output={Path('a') / 'b'}"]
    return compose(repository() / "configs", words)["sample"]


def test_references_in_prompts() -> None:
    """`${` begins a reference, and `\\${` is the text itself."""
    assert sample("'${train.output}'")["prompts"] == ["a/b"]
    assert sample("'\\${train.output}'")["prompts"] == ["${train.output}"]
    assert sample("'\\${'")["prompts"] == ["${"]
    with pytest.raises(
        UserError, match=r"Interpolation key 'nowhere' not found; .*\\\$\{\.\.\.\} to keep it literally"
    ):
        sample("'${nowhere}'")
    with pytest.raises(UserError, match=r"sample\.prompts"):
        sample("'${'")


def test_a_sweep_is_given_the_last_loss_of_a_complete_run(tmp_path: Path) -> None:
    values = {"train": {"output": str(tmp_path), "steps": 4}, "validation": {"every": 2}}
    assert final_loss(values) is None
    (tmp_path / "summary.json").write_text('{"steps": 4, "loss": 2.5, "validation_loss": 3.5}')
    assert final_loss(values) == 3.5
    assert final_loss({**values, "validation": {"every": 0}}) == 2.5
    assert final_loss({**values, "train": {"output": str(tmp_path), "steps": 8}}) is None
