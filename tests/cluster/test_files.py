"""The shell scripts, the Dockerfile and the shell lines of cluster/'s manifest pass their checkers."""

import re
import subprocess
import sys
from pathlib import Path

from tests.cluster.test_kubernetes import load_documents
from tests.harness.debian import require_package
from tests.harness.launching import ROOT


def test_scripts_and_the_shell_lines_of_a_pod_pass_shellcheck(tmp_path) -> None:
    require_package("shellcheck")
    scripts = list((ROOT / "cluster").rglob("*.sh"))
    assert ROOT / "cluster/ssh/train.sh" in scripts
    [container] = load_documents()["Job"]["spec"]["template"]["spec"]["containers"]
    scripts.append(tmp_path / "pod.sh")
    scripts[-1].write_text(f"#!/bin/bash\n{container['args'][0]}")
    done = subprocess.run(["shellcheck"] + scripts, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_passes_hadolint_and_runs_as_a_user() -> None:
    file = ROOT / "cluster/docker/Dockerfile"
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    assert re.findall(r"^FROM .*:(\d+\.\d+\.\d+)-", text, re.MULTILINE), "the base is pinned"
    # By number: runAsNonRoot can't check a name.
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE)[-1] == "1000"
