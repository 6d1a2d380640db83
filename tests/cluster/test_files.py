"""The shell scripts, the Dockerfile and the manifests' lines of cluster/ pass their checkers."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.harness.debian import require_package
from tests.harness.launching import ROOT


def test_shell_scripts_and_shell_lines_of_manifests_pass_shellcheck(tmp_path) -> None:
    require_package("shellcheck")
    scripts = [*(ROOT / "cluster").rglob("*.sh")]
    assert ROOT / "cluster/ssh/train.sh" in scripts
    texts = shell_texts([[*yaml.safe_load_all(path.read_text())] for path in (ROOT / "cluster").rglob("*.yaml")])
    assert texts  # of Kubernetes' manifest
    for number, text in enumerate(texts):
        scripts.append(tmp_path / f"{number}.sh")
        scripts[-1].write_text(f"#!/bin/bash\n{text}")
    done = subprocess.run(["shellcheck", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def shell_texts(node: object) -> list[str]:
    """Texts of several lines, which are shell scripts in these files."""
    if isinstance(node, str):
        return [node] if "\n" in node else []
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [text for child in children for text in shell_texts(child)]


def test_dockerfile_passes_hadolint_and_runs_as_a_user() -> None:
    file = ROOT / "cluster/docker/Dockerfile"
    done = subprocess.run([Path(sys.executable).parent / "hadolint", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    assert re.findall(r"^FROM .*:(\d+\.\d+\.\d+)-", text, re.MULTILINE), "the base is pinned"
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE)[-1] == "1000"  # by number: runAsNonRoot can't check a name
