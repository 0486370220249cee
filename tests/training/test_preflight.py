"""What is wrong with a cluster is said before a run takes memory."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pangu.common.errors import LocalError, UserError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import preflight
from pangu.training.preflight import Node, check_cluster, raise_open_files, require_equal, require_shared, warnings
from tests.configs import config
from tests.threads import Ranks

NODE = Node("a", "H100", "pangu 1, torch 2", "0123")


def test_unequal_versions_and_configurations_are_refused() -> None:
    require_equal([NODE, replace(NODE, host="b", device="A100")])
    with pytest.raises(UserError, match=r"rank 1 on b has pangu 1, torch 3, rank 0 on a has pangu 1, torch 2"):
        require_equal([NODE, replace(NODE, host="b", versions="pangu 1, torch 3")])
    with pytest.raises(UserError, match=r"rank 2 on b was started with a different configuration than rank 0 on a"):
        require_equal([NODE, NODE, replace(NODE, host="b", configuration="4567")])


def test_paths_may_differ_between_nodes_and_nothing_else() -> None:
    device = torch.device("cpu")
    here = Node.of(config("+config=quickstart"), device)
    assert Node.of(config("+config=quickstart", "train.output=elsewhere", "data.folder=/scratch"), device) == here
    for word in ("train.seed=5", "data.packing.reset_mask=false", "data=synthetic", "parallel.zero=1"):
        assert Node.of(config("+config=quickstart", word), device).configuration != here.configuration


def test_what_makes_a_run_slow_is_a_warning() -> None:
    nodes = [replace(NODE, host=host) for host in "aabb"]
    assert warnings(nodes, Layout(tensor=2, data=2)) == []
    (line,) = warnings([*nodes[:3], replace(nodes[3], device="A100")], Layout(tensor=2, data=2))
    assert "H100 (on a), A100 (on b)" in line
    (line,) = warnings(nodes, Layout(tensor=4))
    assert "spans 2 nodes (a, b)" in line
    assert "use a parallel.tensor of at most 2" in line


def test_the_limit_of_open_files_is_raised_or_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 600), hard))
        raise_open_files(30)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512 + 4 * 30, hard)
        with pytest.raises(
            LocalError, match=rf"at most {hard} are allowed, {hard} processes need about {512 + 4 * hard}"
        ):
            raise_open_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shared(rank: int, world: int, folders: list[Path], hosts: str) -> str:
    try:
        require_shared(folders[rank], Mesh.connect(Layout(data=world), torch.device("cpu")), list(hosts))
    except UserError as error:
        return str(error)
    return ""


def test_a_run_folder_of_one_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SHARED_WITHIN_SECONDS", 0.2)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = folders
    assert Ranks().run(3, shared, [one] * 3, "aab") == [""] * 3
    for message in Ranks().run(3, shared, [one, one, other], "aab"):
        assert re.match(rf"train.output = ({one}|{other}): b does not see the files of a", message)
    assert list(one.iterdir()) == []


def named(rank: int, world: int, output: Path) -> tuple[str, str]:
    mesh = Mesh.connect(Layout(data=world), torch.device("cpu"))
    check_cluster(config("+config=quickstart", f"train.output={output}"), mesh)
    return mesh.name, mesh.named([0, 2])


@pytest.mark.parametrize(
    ("hosts", "last", "two"), [("aab", "rank 2 on b", "rank 0 on a, 2 on b"), ("aaa", "rank 2", "rank 0, 2")]
)
def test_ranks_are_named_with_their_nodes(
    hosts: str, last: str, two: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Node, "of", lambda config, device: replace(NODE, host=hosts[dist.get_rank()]))
    assert Ranks().run(3, named, tmp_path)[2] == (last, two)
