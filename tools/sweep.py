"""Search for the best flags of a recipe with Optuna: offline, resumable, and from the file that `wandb sweep` takes.

    python -m tools.sweep recipes/presets/sweep_cls.yaml --trials 20

Each trial is a run of its own, started by the file's command. A trial that is worse than the median of those before it, at the
same step, is stopped. Kill the sweep at any moment: the same command continues it, the unfinished trial from its checkpoint.
Flags of the recipe may follow, such as --data FOLDER --epochs 5; they hold for every trial. Optuna's own commands read the
study: optuna trials --study-name sweep_cls --storage sqlite:///runs/sweep_cls.db
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import Refused, RestartNeeded
from common.files import SMALL, open_regular, read_text
from common.launching.exit_codes import RESUMABLE
from common.run.folder import read_json
from tools.command_line import parser_of

if TYPE_CHECKING:  # importing Optuna takes a second, which --help need not
    import optuna

EXAMPLE = "recipes/presets/sweep_cls.yaml is an example"
METHODS = ("random", "bayes")
KINDS = ("uniform", "int_uniform", "log_uniform_values", "q_uniform")
POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process is sent when its parent ends


def read(path: Path) -> dict[str, Any]:
    """The content of a sweep file; `parameters` are Optuna's distributions. Raises `Refused`."""
    try:
        content = yaml.safe_load(read_text(path, SMALL))
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
    parameters = {name: _distribution(path, name, options) for name, options in content["parameters"].items()}
    return content | {"parameters": parameters}


def _distribution(path: Path, name: str, options: Any) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    options = options if isinstance(options, dict) else {}
    kind, low, high = options.get("distribution"), options.get("min"), options.get("max")
    try:
        if "values" in options or "value" in options:
            return CategoricalDistribution(options.get("values") or [options["value"]])
        if kind == "int_uniform" or (kind is None and isinstance(low, int) and isinstance(high, int)):
            return IntDistribution(low, high)
        if kind is not None and kind not in KINDS:
            raise ValueError(kind)
        step = options.get("q", 1.0) if kind == "q_uniform" else None
        return FloatDistribution(low, high, log=kind == "log_uniform_values", step=step)
    except (ValueError, TypeError, KeyError):
        raise Refused(
            f"{path}: parameter {name} is {json.dumps(options)}; give value, values, or min and max with one of the "
            f"distributions {', '.join(KINDS)}"
        ) from None


def flags_of(values: dict[str, Any]) -> list[str]:
    """{"lr": 0.1, "pretrained": False} -> --lr=0.1 --no_pretrained"""
    switches = {True: "--{}", False: "--no_{}"}
    return [switches[v].format(name) if isinstance(v, bool) else f"--{name}={v}" for name, v in values.items()]


def command_of(content: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The command of a trial, as `wandb agent` makes it."""
    macros = {"${env}": [], "${interpreter}": [sys.executable], "${program}": [content["program"]]}
    macros["${args}"] = flags_of(values)
    words = [word for part in map(str, content["command"]) for word in macros.get(part, [part])]
    if words[0] == "accelerate":  # this Python's
        words[0:1] = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    return words


class Sweep:
    """A study of trials. `flags` are the recipe's, for every trial."""

    def __init__(self, words: argparse.Namespace, flags: list[str]) -> None:
        self.words, self.flags, self.file, self.name = words, flags, read(words.file), words.file.stem
        self.metric, self.goal = self.file["metric"]["name"], self.file["metric"]["goal"]
        self.store = words.output_dir / f"{self.name}.db"
        self._storage = f"sqlite:///{self.store.resolve()}"
        self._child: subprocess.Popen | None = None

    def run(self) -> None:
        """Make trials until there are as many as asked for, and print them."""
        from optuna.trial import Trial, TrialState

        self.store.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.store.with_name(f"{self.store.name}.lock"), f"{self.store} is in use by another sweep"):
            self._study = self._open()
            parameters, count = self.file["parameters"], self.words.trials
            while True:
                trials = self._study.trials
                running = [trial for trial in trials if trial.state is TrialState.RUNNING]  # a killed sweep left it
                if running:
                    self._try(Trial(self._study, running[0]._trial_id))
                    continue
                if len(trials) >= count:
                    break
                self._study.sampler = self._sampler(len(trials))
                self._try(self._study.ask(parameters))
            with contextlib.suppress(ValueError):  # no trial was completed
                best = self._study.best_trial
                result = f"{self.metric} {best.value:.4f}"
                print(f"best: {self._run(best.number)}  {result}  {' '.join(flags_of(best.params))}")
            command = ["optuna", "trials", "--study-name", self.name, "--storage", self._storage]
            print(f"all trials: {shlex.join(command)}")

    def leave(self) -> None:
        """Let the run that is on its way save and end."""
        if self._child and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def _open(self) -> "optuna.Study":
        """The study of this sweep, new or as an earlier start left it."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            storage=self._storage,
            study_name=self.name,
            direction=self.goal,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=self.words.unpruned),
            load_if_exists=True,
        )
        told = {key: self.file[key] for key in ("program", "method", "metric", "command")}
        told["parameters"] = {name: str(of) for name, of in self.file["parameters"].items()}
        told |= {"--sweep_seed": self.words.sweep_seed, "--output_dir": str(self.words.output_dir.resolve())}
        told |= {"--unpruned": self.words.unpruned, "flags of the recipe": self.flags}
        before = study.user_attrs.get("sweep", told)
        if differing := [key for key in told if json.dumps(told[key]) != json.dumps(before.get(key))]:
            raise Refused(
                f"{self.store} was begun with another {', '.join(differing)}: restore it, or give another --output_dir"
            )
        study.set_user_attr("sweep", told)
        return study

    def _sampler(self, number: int) -> "optuna.samplers.BaseSampler":
        """Of a trial: its values follow from the seed, its number and what earlier trials gave, also after a kill."""
        from optuna.samplers import RandomSampler, TPESampler

        digest = hashlib.sha256(f"{self.words.sweep_seed} {number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        return TPESampler(seed=seed) if self.file["method"] == "bayes" else RandomSampler(seed)

    def _try(self, trial: "optuna.Trial") -> None:
        """Make or continue the run of a trial, and tell the study what became of it."""
        from optuna.trial import TrialState

        run, before = self._run(trial.number), {}
        folder = self.words.output_dir / run
        print(f"{run}: {' '.join(flags_of(trial.params))}", flush=True)
        if (folder / ".lock").exists():
            with _locked(folder / ".lock"):  # an earlier start of this trial may still be saving
                before = read_json(folder / "status.json")
        own = ["--name", run, "--output_dir", str(self.words.output_dir), "--group", self.name]
        command = [*command_of(self.file, trial.params), *self.flags, *own]
        with tempfile.TemporaryFile("w+") as errors:
            self._child = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, preexec_fn=_end_with_parent
            )
            seen, stopped = self._watch(trial, folder / "metrics.jsonl")
            code = self._child.wait()
            errors.seek(0)
            said = (errors.read().strip().splitlines() or ["no message"])[-1]
        status = read_json(folder / "status.json")
        if stopped:
            outcome = f"stopped at step {max(seen)}"
            self._study.tell(trial, state=TrialState.PRUNED)
        elif code and status == before:
            raise Refused(f"{run} did not start: {said}")
        elif status["status"] == "finished" and (finite := [value for value in seen.values() if math.isfinite(value)]):
            value = max(finite) if self.goal == "maximize" else min(finite)
            outcome = f"{self.metric} {value:.4f}"
            self._study.tell(trial, value)
        elif status["status"] in ("finished", "failed"):
            cause = status["cause"] if code else f"no finite {self.metric} in {folder}/metrics.jsonl"
            outcome = f"failed: {cause}"
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            raise RestartNeeded(f"{run} was interrupted at step {status['step']}: the same command continues it")
        print(f"{run}: {outcome}", flush=True)

    def _watch(self, trial: "optuna.Trial", rows: Path) -> tuple[dict[int, float], bool]:
        """Report the metric of every evaluation until the run ends or is stopped: its values by step, and whether it was."""
        assert self._child
        reported, seen = self._study.trials[trial.number].intermediate_values, {}
        while True:
            ended = self._child.poll() is not None  # before the rows are read, so that none is missed
            for step, value in evaluations(rows, self.metric):
                if step in seen:
                    continue
                seen[step] = value
                if step not in reported and math.isfinite(value):
                    trial.report(value, step)
                if trial.should_prune():
                    self._child.terminate()
                    return seen, True
            if ended:
                return seen, False
            time.sleep(POLL_S)

    def _run(self, number: int) -> str:
        return f"{self.name}-{number:03d}"


def evaluations(rows: Path, metric: str) -> Iterator[tuple[int, float]]:
    """Step and value of each row of a metrics.jsonl that has the metric; NaN for null.

    Raises `Refused` if the run has a moving average, which it exports, and the metric is not of the average.
    """
    if not rows.exists():
        return
    with open_regular(rows) as file:
        lines = file.read().decode(errors="replace").splitlines()
    averaged = metric.replace("eval/", "eval/ema_")
    for line in lines:
        if f'"{metric}"' in line and line.endswith("}"):  # the last line may be half written
            row = json.loads(line)
            if averaged in row:
                raise Refused(f"metric {metric}: with --ema_decay the average is exported; search for {averaged}")
            yield row["step"], math.nan if row[metric] is None else float(row[metric])


@contextlib.contextmanager
def _locked(path: Path, refusal: str = "") -> Iterator[None]:
    """Hold the lock of a file. If another process holds it, wait, or raise `Refused` with `refusal`."""
    with path.open("ab+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except OSError:
            raise Refused(refusal) from None
        yield


def _end_with_parent() -> None:
    """In the child, on Linux: if this process is killed, the launcher is asked to end, so that its run saves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of("sweep", __doc__)
    parser.add_argument("file", type=Path, help="program, method, metric, parameters, command")
    parser.add_argument("--trials", type=int, default=20, help="trials in all, over every start (default: 20)")
    out = "where run folders and the study, NAME OF FILE.db, go (default: runs)"
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help=out)
    parser.add_argument("--sweep_seed", type=int, default=0, help="decides which values are tried (default: 0)")
    parser.add_argument("--unpruned", type=int, default=5, help="trials before one is stopped (default: 5)")
    return parser


def main(argv: list[str] | None = None) -> None:
    words, flags = arguments().parse_known_args(argv)
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise Refused("tools.sweep needs Optuna: pip install optuna") from None
    sweep = Sweep(words, flags)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweep.run()
    except KeyboardInterrupt:
        raise RestartNeeded("the sweep was stopped: the same command continues it") from None
    finally:
        sweep.leave()


if __name__ == "__main__":
    try:
        main()
    except (Refused, RestartNeeded) as error:
        print(error, file=sys.stderr)
        sys.exit(RESUMABLE if isinstance(error, RestartNeeded) else 2)
