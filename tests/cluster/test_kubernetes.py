"""The Kubernetes manifests are valid, and their commands train on two machines with the environment that pods get there."""

from pathlib import Path

import pytest
import yaml

from tests.cluster.two_machines import WORDS, assert_same_losses
from tests.harness.launching import ROOT, Started
from tests.harness.machines import Node

FOLDER = ROOT / "cluster/kubernetes"


def documents(name: str) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


def training_job(runtime: dict) -> dict:
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]


JOBS = {
    "indexed_job.yaml": lambda: documents("indexed_job.yaml")["Job"],
    "trainjob.yaml": lambda: training_job(documents("trainjob.yaml")["TrainingRuntime"]),
}


def test_the_indexed_job_is_valid():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents("indexed_job.yaml").values():
        kubernetes_validate.validate(document, "1.33", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document | {"spec": document["spec"] | {"replica": 2}}, "1.33", strict=True)


def test_the_train_job_is_valid():
    """Against the operator's models, which ignore unknown keys: what they give back has to be what the file says."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for kind, document in documents("trainjob.yaml").items():
        model = getattr(models, f"TrainerV1alpha1{kind}")
        assert model.from_dict(document).to_dict() == document
        unknown = document | {"spec": document["spec"] | {"nodes": 2}}
        assert model.from_dict(unknown).to_dict() != unknown
    runtime = documents("trainjob.yaml")["TrainingRuntime"]
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = training_job(runtime)
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": job["spec"]}
    kubernetes_validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_pod_has_time_memory_and_rights(name):
    job = JOBS[name]()["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) + 10
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert "value" not in env["WANDB_API_KEY"] and env["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]["optional"]
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        exits = rule.get("onExitCodes", {"values": ["disruption"], "containerName": container["name"]})
        assert exits["containerName"] == container["name"]
        actions |= dict.fromkeys(exits["values"], rule["action"])
    assert actions == {2: "FailJob", 75: "Ignore", "disruption": "Ignore"}
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert pod["securityContext"]["runAsNonRoot"] and not container["securityContext"]["allowPrivilegeEscalation"]


@pytest.fixture
def pods(nodes, tmp_path) -> list[Node]:
    """Two machines that know the names that a headless service and a JobSet give to the first pod."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 train-0.train train-node-0-0.train\n")
    return nodes(2, own={1: {Path("/etc/hosts"): tmp_path / "hosts"}})


def start(name: str, pods: list[Node], folder: Path) -> list[Started]:
    """The container's command on each machine, with the environment that Kubernetes and the operator give."""
    [container] = JOBS[name]()["spec"]["template"]["spec"]["containers"]
    files = documents(name)
    args = container.get("args", files.get("TrainJob", {}).get("spec", {}).get("trainer", {}).get("args"))
    flags = [flag for flag in args if not flag.startswith(("--config", "--data"))]  # marked EDIT
    command = [str(word).replace("/runs", str(folder)) for word in (*container["command"], *flags, *WORDS)]
    started = []
    for index, pod in enumerate(pods):
        env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        env |= {"POD_IP": pod.address, "CUDA_VISIBLE_DEVICES": "-1"}
        if name == "trainjob.yaml":
            env |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
            env |= {"PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}
            env |= {"ACCELERATE_MIXED_PRECISION": "no"}
        else:
            assert {"NODES": env["NODES"], "CONFIG": env["CONFIG"]} == {"NODES": "2", "CONFIG": "2node_bf16"}
            env |= {"JOB_COMPLETION_INDEX": str(index), "CONFIG": "2node_cpu", "GPUS": "1"}
        started.append(pod.start_command(*command, env=env))
    return started


@pytest.mark.parametrize("name", ["indexed_job.yaml", pytest.param("trainjob.yaml", marks=pytest.mark.long)])
def test_its_command_trains_on_two_machines(name, pods, alone, tmp_path):
    """The losses are one process's. tests/cluster/test_stop.py deletes a pod."""
    done = [each.finish() for each in start(name, pods, tmp_path)]
    assert [each.returncode for each in done] == [0, 0], done
    assert "2 processes on 2 nodes" in done[0].stdout
    assert_same_losses(tmp_path / "train", alone)
