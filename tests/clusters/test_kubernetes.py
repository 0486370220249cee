"""The files that start runs on clusters fit the schemas of these, and their commands are understood."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
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
    words = container["command"] + container["args"]
    for index in ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX"):  # of Kubernetes, of Volcano
        words = [word.replace(f"$({index})", "1") for word in words]
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


def validated_by_kubeflow(manifest: dict[str, Any]) -> None:
    """Fields that its models do not know would be missing from what they give back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    prefix = {"JobSet": "JobsetV1alpha2", "TrainJob": "TrainerV1alpha1", "TrainingRuntime": "TrainerV1alpha1"}
    kind = manifest["kind"]
    assert getattr(models, f"{prefix[kind]}{kind}").from_dict(manifest).to_dict() == manifest


def job_of_set(spec: dict[str, Any]) -> dict[str, Any]:
    """The only Job of a JobSet, which a mistake of the user ends, and a run that was told to stop does not."""
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]
    validated({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "pangu"}, "spec": job["spec"]})
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {value: rule["action"] for rule in rules for value in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {USER_ERROR: "FailJob", RETRYABLE: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"] for container in job["spec"]["template"]["spec"]["containers"]
    }
    (mistake,) = spec["failurePolicy"]["rules"]
    assert (mistake["action"], mistake["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    return job


def test_the_job_set() -> None:
    (job_set,) = manifests("jobset.yaml").values()
    job = job_of_set(job_set["spec"])["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completions"] == job["parallelism"] == 2
    name = job_set["metadata"]["name"]
    assert {"--nnodes=2", "--nproc-per-node=8", f"--master-addr={name}-node-0-0.{name}"} < set(run_of(container))
    validated_by_kubeflow(job_set)


def test_the_train_job(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = manifests("trainjob.yaml")
    runtime, job = kinds["TrainingRuntime"], kinds["TrainJob"]["spec"]
    assert job["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    replicated = job_of_set(runtime["spec"]["template"]["spec"])
    assert replicated["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    monkeypatch.setenv("PET_NNODES", str(job["trainer"]["numNodes"]))  # as the Trainer does
    monkeypatch.setenv("PET_NPROC_PER_NODE", str(job["trainer"]["numProcPerNode"]))
    run_of(job["trainer"])
    (container,) = replicated["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"  # into which the Trainer puts the command
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["trainer"]["numProcPerNode"]
    for manifest in kinds.values():
        validated_by_kubeflow(manifest)


def test_the_job_of_volcano() -> None:
    (job,) = manifests("volcano.yaml").values()
    spec, name = job["spec"], job["metadata"]["name"]
    (task,) = spec["tasks"]
    pod = task["template"]["spec"]
    validated({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod})
    (container,) = pod["containers"]
    words = run_of(container)
    assert spec["minAvailable"] == task["replicas"] == 2
    assert {"--nnodes=2", f"--master-addr={name}-{task['name']}-0.{name}", "train.device=npu"} < set(words)
    assert set(spec["plugins"]) == {"env", "svc"}  # VC_TASK_INDEX and the names of the pods
    requested, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requested["huawei.com/Ascend910"] == limits["huawei.com/Ascend910"] == 8
    assert spec["policies"][0] == {"exitCode": USER_ERROR, "action": "TerminateJob"}
    assert all(("exitCode" in policy) != bool({"event", "events"} & set(policy)) for policy in spec["policies"])


def noted(script: list[str], folder: Path, **variables: str) -> list[str]:
    """The words of the Python that a script starts, in whose place a command notes them."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {folder}/words\n')
    python.chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(script, env=environment, check=True, cwd=repository())
    return ["python", *(folder / "words").read_text().splitlines()]


def test_the_script_for_modelarts(tmp_path: Path) -> None:
    hosts = "modelarts-worker-0.job,modelarts-worker-1.job"
    variables = {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": hosts, "MA_NUM_GPUS": "8"}
    example = (repository() / "scripts/modelarts.sh").read_text(encoding="utf-8").split("bash scripts/modelarts.sh ")[1]
    overrides = example.split("\n#\n")[0].replace("\\\n#", "").split()
    words = noted(["bash", "scripts/modelarts.sh", *overrides], tmp_path, **variables)
    understood(words)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=modelarts-worker-0.job", "--nproc-per-node=8"} < set(words)
    assert words[-len(overrides) :] == overrides


def test_the_task_of_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load((repository() / "scripts/skypilot.yaml").read_text(encoding="utf-8"))
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [RETRYABLE]}
    node = {"NODE_RANK": "0", "NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": str(task["num_nodes"])}
    node["NUM_GPUS_PER_NODE"] = task["resources"]["accelerators"].split(":")[1]
    variables = {f"SKYPILOT_{name}": value for name, value in node.items()}
    words = noted(["bash", "-c", task["run"]], tmp_path, **variables)
    understood(words)
    assert {"--master-addr=10.0.0.1", "--nproc-per-node=8", f"train.stop_status={RETRYABLE}"} < set(words)
    understood(shlex.split(task["setup"]))
