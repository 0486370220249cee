"""The manifests are what Kubernetes and the training operator take, and their commands are understood."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pangu.common.exit_status import RETRYABLE, USER_ERROR
from tests.configs import config
from tests.end_to_end.test_pages import understood
from tests.spawn import repository

FOLDER = repository() / "scripts" / "kubernetes"
WHOLE = {"type": "integer", "minimum": 0}
REPLICAS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicas", "restartPolicy", "template"],
    "properties": {
        "replicas": WHOLE,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object", "required": ["spec"]},
    },
}
PYTORCH_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": {"type": "string"},
                "elasticPolicy": {"type": "object"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "activeDeadlineSeconds": WHOLE,
                        "backoffLimit": WHOLE,
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "schedulingPolicy": {"type": "object"},
                        "suspend": {"type": "boolean"},
                        "ttlSecondsAfterFinished": WHOLE,
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"Master": REPLICAS, "Worker": REPLICAS},
                },
            },
        },
    },
}
"""Of the fields that there are in v1 of the training operator, written after its types; the pods are checked apart."""


def manifests(name: str) -> dict[str, Any]:
    """Those of a file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


def validated(manifest: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def run_of(container: dict[str, Any]) -> list[str]:
    """The words of its command, all of which are understood."""
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"] + container["args"]]
    understood(words)
    overrides = words[words.index("pretrain.py") + 1 :]
    assert config(*overrides).train.stop_status == RETRYABLE
    return words


def test_the_job() -> None:
    kinds = manifests("job.yaml")
    for manifest in kinds.values():
        validated(manifest)
    job = kinds["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    words = run_of(container)
    assert job["completions"] == job["parallelism"] == 2
    assert {"--nnodes=2", "--nproc-per-node=8"} < set(words)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    name, service = kinds["Job"]["metadata"]["name"], kinds["Service"]["metadata"]["name"]
    assert f"--master-addr={name}-0.{service}" in words
    assert pod["subdomain"] == service
    assert kinds["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"batch.kubernetes.io/job-name": name}
    exits = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["containerName"] for rule in exits} == {container["name"]}
    assert [rule["values"] for rule in exits] == [[USER_ERROR], [RETRYABLE]]


def test_the_pytorch_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")  # as the operator does
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    (job,) = manifests("pytorchjob.yaml").values()
    pytest.importorskip("jsonschema").validate(job, PYTORCH_JOB)
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replicas["template"]["spec"]
        validated({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pangu"}, "spec": pod})
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # which the operator looks for
        run_of(container)
    assert job["spec"]["nprocPerNode"] == "8"
