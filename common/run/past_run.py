"""Past run: the contents of a run folder, whatever became of the run.

A killed run lacks files, and a folder may be copied from elsewhere. So each file is read by itself,
and a missing or damaged one is empty.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import Refused
from common.files import MEDIUM, SMALL, open_regular, read_yaml
from common.run.folder import read_json
from common.run.plots import finite
from common.run.progress import metric_of, of_exported

_STEP = re.compile(r"\S+ \S+  step [\d,]+/")  # a line of the log about the progress


@dataclass(frozen=True)
class PastRun:
    """A run folder. Raises `Refused` if it is none."""

    path: Path

    def __post_init__(self) -> None:
        names = ("config.yaml", "metrics.jsonl", "status.json", "log.txt")
        if not any((self.path / name).is_file() for name in names):
            raise Refused(f"{self.path}: is no run folder, it has none of {', '.join(names)}")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            content = read_yaml(self.path / "config.yaml", SMALL)
        except (OSError, ValueError, Refused):
            return {}
        return content if isinstance(content, dict) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_json(self.path / "environment.json")

    @cached_property
    def status(self) -> dict[str, Any]:
        return read_json(self.path / "status.json")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, which is there from the first checkpoint on."""
        return read_json(self.path / "summary.json")

    @cached_property
    def results(self) -> dict[str, Any]:
        """The results of the best model, see `of_exported`; results of classes by name."""
        # With a line for each class.
        return of_exported(read_json(self.path / "best" / "results.json", MEDIUM))

    @property
    def leading(self) -> str:
        """The result that decides which model is best, such as `accuracy`; "" if there is none yet."""
        return metric_of(get_text(self.summary, "leading"))

    def evaluation(self, which: str) -> dict[str, float | None]:
        """The results of the `best` or the `last` evaluation, numbers only, see `of_exported`."""
        results = self._recorded(which)
        return of_exported(
            {key: finite(value) for key, value in results.items() if key.startswith("eval/")}
        )

    def step_of(self, which: str) -> int:
        """The step of the `best` or the `last` evaluation; 0 if there is none."""
        return int(finite(self._recorded(which).get("step")) or 0)

    def _recorded(self, which: str) -> dict[str, Any]:
        results = self.summary.get(which)
        return results if isinstance(results, dict) else {}

    @property
    def messages(self) -> list[str]:
        """The last lines of the log, with their times, except those about the progress."""
        try:
            with open_regular(self.path / "log.txt") as file:
                file.seek(max(0, file.seek(0, 2) - MEDIUM))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if not _STEP.match(line)]

    @property
    def fingerprint(self) -> str:
        """The fingerprints training-validation of the data at the newest start; "" if not known."""
        return get_text(self.environment, "fingerprint")

    @property
    def repeat_command(self) -> str:
        """The command that makes the same run again in another folder, from its complete configuration."""
        command = get_text(self.environment, "command")
        launch = get_text(self.environment, "launch")
        launcher = "accelerate launch"
        if command and launch.endswith(command):
            launcher = launch.removesuffix(command)
        argv = launcher.split()
        argv.append(get_text(self.environment, "recipe", default="recipes/cls.py"))
        argv += ["--config", str(self.path / "config.yaml"), "--name", f"{self.name}-again"]
        # Quoted again: in a stranger's file an argument may hold a second command.
        return shlex.join(argv)


def get_text(content: Mapping[str, Any], key: str, default: str = "") -> str:
    """The value of `key` as text; `default` if it is missing or empty."""
    value = content.get(key)
    return str(value) if value else default
