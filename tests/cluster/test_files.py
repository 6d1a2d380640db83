"""The files of cluster/ are what their checkers ask for: shell scripts, Dockerfile, manifests; and no file holds a secret."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.debian import require_package
from tests.harness.launching import ROOT

SECRETS = {
    "private key": r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----",
    "AWS": r"\bAKIA[0-9A-Z]{16}\b",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{40}",
    "Hugging Face": r"\bhf_[A-Za-z0-9]{30}",
    "W&B": r"(?i)(?:wandb|api[_-]?key)\W{1,6}(?:value\W{1,4})?[0-9a-f]{40}\b",
    "value of a variable": r"(?i)(?:API_KEY|TOKEN|SECRET|PASSWORD)\b[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9_/+-]{16,}(?![\w(\[.])",
}


def tracked(*patterns: str) -> list[Path]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def secrets(text: str) -> list[str]:
    return [name for name, pattern in SECRETS.items() if re.search(pattern, text)]


@pytest.mark.smoke
def test_no_file_holds_a_secret() -> None:
    wrong = {}
    for path in tracked():
        if path.stat().st_size < 1_000_000 and (found := secrets(path.read_text(errors="replace"))):
            wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong.pop("tests/cluster/test_files.py")  # the examples below
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "aws: AKIAIOSFODNN7EXAMPLE",
        "export HF_HOME=x hf_" + "a1B2" * 9,
        "- {name: WANDB_API_KEY, value: " + "0123456789abcdef" * 2 + "01234567}",
        "WANDB_API_KEY=" + "a1" * 20,
        'PASSWORD: "correct-horse-battery-staple"',
    ],
)
def test_a_secret_would_be_seen(line: str) -> None:
    assert secrets(line)
    assert not secrets("- {name: WANDB_API_KEY, valueFrom: {secretKeyRef: {name: wandb, key: api-key}}}")


def test_shell_scripts_pass_shellcheck() -> None:
    require_package("shellcheck")
    scripts = tracked("*.sh")
    assert ROOT / "cluster/ssh/train.sh" in scripts
    done = subprocess.run(["shellcheck", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shell_lines_of_manifests_pass_shellcheck(tmp_path) -> None:
    require_package("shellcheck")
    texts = [
        text for path in tracked("cluster/*.yaml") for text in shell_texts([*yaml.safe_load_all(path.read_text())])
    ]
    assert len(texts) >= 4  # of two Kubernetes manifests; SkyPilot's setup and run
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.sh").write_text(f"#!/bin/bash\n{text}")
    # SC1091: the virtual environment is made on the machine.
    words = ["shellcheck", "--exclude", "SC1091", *tmp_path.glob("*.sh")]
    done = subprocess.run(words, capture_output=True, text=True)
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


def test_docker_build_gets_what_training_needs_and_no_more() -> None:
    lines = (ROOT / "cluster/docker/Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    sent = {
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if not any(fnmatch.fnmatch(part, pattern) for part in path.relative_to(ROOT).parts for pattern in patterns)
    }
    folders = {path.partition("/")[0] for path in sent if "/" in path}
    assert folders == {"accelerate_configs", "cluster", "common", "compat", "recipes", "tools"}
    assert {"requirements.txt", "pyproject.toml", "LICENSE"} <= sent
