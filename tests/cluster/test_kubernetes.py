"""The Kubernetes manifest is valid, and its command trains on two machines with the environment
that pods get there.
"""

from pathlib import Path

import pytest
import yaml

from tests.cluster.two_machines import WORDS, assert_same_losses
from tests.harness.launching import ROOT

FILE = ROOT / "cluster/kubernetes/indexed_job.yaml"


def load_documents() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}


def test_the_indexed_job_is_valid():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in load_documents().values():
        kubernetes_validate.validate(document, "1.33", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                document | {"spec": document["spec"] | {"replica": 2}}, "1.33", strict=True
            )


def test_a_pod_has_time_memory_and_rights():
    job = load_documents()["Job"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert (
        pod["terminationGracePeriodSeconds"]
        > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) + 10
    )
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert (
        "value" not in env["WANDB_API_KEY"]
        and env["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]["optional"]
    )
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        exits = rule.get(
            "onExitCodes", {"values": ["disruption"], "containerName": container["name"]}
        )
        assert exits["containerName"] == container["name"]
        actions |= dict.fromkeys(exits["values"], rule["action"])
    assert actions == {2: "FailJob", 75: "Ignore", "disruption": "Ignore"}
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert (
        pod["securityContext"]["runAsNonRoot"]
        and not container["securityContext"]["allowPrivilegeEscalation"]
    )


def test_its_command_trains_on_two_machines(nodes, alone, tmp_path):
    """The losses are one process's. tests/cluster/test_stop.py deletes a pod."""
    hosts = tmp_path / "hosts"  # with the name that a headless service gives to the first pod
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 train-0.train\n")
    [container] = load_documents()["Job"]["spec"]["template"]["spec"]["containers"]
    # Marked EDIT.
    flags = [flag for flag in container["args"] if not flag.startswith(("--config", "--data"))]
    command = [
        str(word).replace("/runs", str(tmp_path)) for word in container["command"] + flags + WORDS
    ]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert (env["NODES"], env["CONFIG"]) == ("2", "2node_bf16")
    env |= {"CUDA_VISIBLE_DEVICES": "-1", "CONFIG": "2node_cpu", "GPUS": "1"}
    started = []
    for index, pod in enumerate(nodes(2, own={1: {Path("/etc/hosts"): hosts}})):
        pod_env = {"POD_IP": pod.address, "JOB_COMPLETION_INDEX": str(index)}
        started.append(pod.start_command(command, env=env | pod_env))
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [0, 0], done
    assert "2 processes on 2 nodes" in done[0].stdout
    assert_same_losses(tmp_path / "train", alone)
