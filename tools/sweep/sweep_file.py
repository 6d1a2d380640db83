"""A sweep file: what `wandb sweep` takes, as far as Optuna can search it too."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import Refused

EXAMPLE = "recipes/presets/sweep_cls.yaml is an example"
METHODS = ("random", "bayes", "grid")
KINDS = ("", "uniform", "int_uniform", "log_uniform_values", "q_uniform")


@dataclass(frozen=True)
class Parameter:
    """A flag that is searched: one of `values`, or a number from `low` to `high`."""

    values: tuple = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    logarithmic: bool = False
    step: float | None = None


@dataclass(frozen=True)
class SweepFile:
    """A sweep file that was checked."""

    path: Path
    content: dict[str, Any]
    parameters: dict[str, Parameter]

    @property
    def metric(self) -> str:
        """A key of metrics.jsonl, such as eval/top1."""
        return self.content["metric"]["name"]

    @property
    def goal(self) -> str:
        """maximize or minimize."""
        return self.content["metric"]["goal"]

    def flags(self, values: dict[str, Any]) -> list[str]:
        """{"lr": 0.1, "pretrained": False} -> --lr=0.1 --no_pretrained"""
        switches = {True: "--{}", False: "--no_{}"}
        return [
            switches[value].format(name) if isinstance(value, bool) else f"--{name}={value}"
            for name, value in values.items()
        ]

    def command(self, values: dict[str, Any], config_file: str | None) -> list[str]:
        """The command of a trial, as `wandb agent` makes it; with another Accelerate config if one is given."""
        macros = {"${env}": [], "${interpreter}": [sys.executable], "${program}": [str(self.content["program"])]}
        macros["${args}"] = self.flags(values)
        words = [word for part in map(str, self.content["command"]) for word in macros.get(part, [part])]
        if words[0] == "accelerate":  # that of this Python
            words[0:1] = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        if config_file and "--config_file" not in words:
            raise Refused(f"--config_file: the command of {self.path} has none to replace")
        if config_file:
            words[words.index("--config_file") + 1] = config_file
        return words


def read(path: Path) -> SweepFile:
    """The sweep file at `path`. Raises `Refused`."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refused(f"{path} can't be read ({' '.join(str(error).split())}); {EXAMPLE}") from None
    content = content if isinstance(content, dict) else {}
    parts = {"program": str, "method": str, "metric": dict, "parameters": dict, "command": list}
    if wrong := [name for name, kind in parts.items() if not content.get(name) or not isinstance(content[name], kind)]:
        raise Refused(f"{path}: {', '.join(wrong)}: missing, or of another kind than `wandb sweep` takes; {EXAMPLE}")
    if content["method"] not in METHODS:
        raise Refused(f"{path}: method {content['method']}: must be one of {', '.join(METHODS)}")
    if not content["metric"].get("name") or content["metric"].get("goal") not in ("maximize", "minimize"):
        raise Refused(f"{path}: metric must have a name, such as eval/top1, and the goal maximize or minimize")
    if "${args}" not in content["command"]:
        raise Refused(f"{path}: command must have ${{args}}, where the flags of a trial belong")
    parameters = {name: _parameter(path, name, options) for name, options in content["parameters"].items()}
    if content["method"] == "grid" and (ranges := [name for name, of in parameters.items() if not of.values]):
        raise Refused(f"{path}: method grid needs `values` of {', '.join(ranges)}; or take method random or bayes")
    return SweepFile(path, content, parameters)


def _parameter(path: Path, name: str, options: Any) -> Parameter:
    options = options if isinstance(options, dict) else {}
    if isinstance(options.get("values"), list) and options["values"]:
        return Parameter(tuple(options["values"]))
    if "value" in options:
        return Parameter((options["value"],))
    kind, low, high = options.get("distribution", ""), options.get("min"), options.get("max")
    numbers = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (low, high))
    logarithmic = kind == "log_uniform_values"
    if kind not in KINDS or not numbers or low > high or (logarithmic and low <= 0):
        raise Refused(
            f"{path}: parameter {name} is {json.dumps(options)}; give value, values, or min and max with one of the "
            f"distributions {', '.join(KINDS[1:])}"
        )
    whole = kind == "int_uniform" or (not kind and isinstance(low, int) and isinstance(high, int))
    return Parameter((), low, high, whole, logarithmic, options.get("q", 1) if kind == "q_uniform" else None)
