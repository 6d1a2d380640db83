"""A study of trials with Optuna: each is a run of a recipe, which is watched through its metrics.jsonl."""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from common.errors import Again, Refused
from common.run.folder import read_json
from tools.sweep.sweep_file import read

try:
    import optuna
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError:
    raise Refused("tools.sweep needs Optuna: pip install optuna") from None

optuna.logging.set_verbosity(optuna.logging.ERROR)

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process is sent when its parent ends


class Sweep:
    """A study of trials. `flags` are the recipe's, for every trial."""

    def __init__(self, words: argparse.Namespace, flags: list[str]) -> None:
        self.words, self.flags, self.file, self.name = words, flags, read(words.file), words.file.stem
        self.store = words.study or words.output_dir / f"{self.name}.db"
        self._child: subprocess.Popen | None = None

    def run(self) -> None:
        """Make trials until there are as many as asked for, and print them."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.store.with_name(f"{self.store.name}.lock"), f"{self.store} is in use by another sweep"):
            self._study = self._open()
            parameters, count = self.file.parameters, self.words.trials
            grid = [*product(*(of.values for of in parameters.values()))] if self._method == "grid" else []
            count = min(count, len(grid)) if grid else count
            while True:
                trials = self._study.trials
                running = [trial for trial in trials if trial.state is TrialState.RUNNING]  # a killed sweep left it
                if not running and sum(trial.state.is_finished() for trial in trials) >= count:
                    break
                if grid and all(trial.state.is_finished() for trial in trials):
                    self._study.enqueue_trial(dict(zip(parameters, grid[len(trials)], strict=True)))
                self._try(Trial(self._study, running[0]._trial_id) if running else self._study.ask())
            print(self._table())

    def leave(self) -> None:
        """Let the run that is on its way save and end."""
        if self._child and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    @property
    def _method(self) -> str:
        return self.file.content["method"]

    def _open(self) -> optuna.Study:
        """The study of this sweep, new or as an earlier start left it."""
        study = optuna.create_study(
            storage=f"sqlite:///{self.store.resolve()}",
            study_name=self.name,
            direction=self.file.goal,  # type: ignore[arg-type]  # checked when the file was read
            pruner=optuna.pruners.MedianPruner(n_startup_trials=self.words.unpruned),
            load_if_exists=True,
        )
        told = {key: self.file.content[key] for key in ("program", "method", "metric", "parameters", "command")}
        told |= {"--sweep_seed": self.words.sweep_seed, "--output_dir": str(self.words.output_dir.resolve())}
        told |= {"--unpruned": self.words.unpruned, "flags of the recipe": self.flags}
        before = study.user_attrs.get("sweep", told)
        if differing := [key for key in told if json.dumps(told[key]) != json.dumps(before.get(key))]:
            raise Refused(
                f"{self.store} was begun with another {', '.join(differing)}: restore it, or give another --study"
            )
        study.set_user_attr("sweep", told)
        return study

    def _suggest(self, trial: Trial) -> dict[str, Any]:
        """The values of a trial: a function of the seed, its number and what earlier trials gave, also after a kill."""
        values = {}
        for name, of in self.file.parameters.items():
            key = hashlib.sha256(f"{self.words.sweep_seed} {trial.number} {name}".encode())
            seed = int.from_bytes(key.digest()[:4], "big")
            self._study.sampler = TPESampler(seed=seed) if self._method == "bayes" else RandomSampler(seed)
            if of.values:
                values[name] = trial.suggest_categorical(name, of.values)
            elif of.whole:
                values[name] = trial.suggest_int(name, int(of.low), int(of.high))
            else:
                values[name] = trial.suggest_float(name, of.low, of.high, log=of.logarithmic, step=of.step)
        return values

    def _try(self, trial: Trial) -> None:
        """Make or continue the run of a trial, and tell the study what became of it."""
        run, values = self._run(trial), self._suggest(trial)
        folder, before = self.words.output_dir / run, {}
        print(f"{run}: {' '.join(self.file.flags(values))}", flush=True)
        if (folder / ".lock").exists():
            with locked(folder / ".lock"):  # an earlier start of this trial may still be saving
                before = read_json(folder / "status.json")
        own = ["--name", run, "--output_dir", str(self.words.output_dir), "--group", self.name]
        command = [*self.file.command(values, self.words.config_file), *self.flags, *own]
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
            trial.set_user_attr("outcome", f"stopped at step {max(seen)}")
            self._study.tell(trial, state=TrialState.PRUNED)
        elif code and status == before:
            raise Refused(f"{run} did not start: {said}")
        elif status["status"] == "finished" and (finite := [value for value in seen.values() if math.isfinite(value)]):
            self._study.tell(trial, max(finite) if self.file.goal == "maximize" else min(finite))
        elif status["status"] in ("finished", "failed"):
            cause = status["cause"] if code else f"no finite {self.file.metric} in {folder / 'metrics.jsonl'}"
            trial.set_user_attr("outcome", f"failed: {cause}")
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            raise Again(f"{run} was interrupted at step {status['step']}: the same command continues it")

    def _watch(self, trial: Trial, rows: Path) -> tuple[dict[int, float], bool]:
        """Report the metric of every evaluation until the run ends or is stopped: its values by step, and whether it was."""
        assert self._child
        reported, seen = self._study.trials[trial.number].intermediate_values, {}
        while True:
            ended = self._child.poll() is not None  # before the rows are read, so that none is missed
            for step, value in evaluations(rows, self.file.metric):
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

    def _run(self, trial: Trial | FrozenTrial) -> str:
        return f"{self.name}-{trial.number:03d}"

    def _table(self) -> str:
        """All trials, and the flags of the best."""
        rows = [["trial", self.file.metric, *self.file.parameters, "outcome"]]
        for trial in self._study.trials:
            value = "-" if trial.value is None else f"{trial.value:.4f}"
            outcome = trial.user_attrs.get("outcome", trial.state.name.lower())
            words = (_word(trial.params.get(name, "-")) for name in self.file.parameters)
            rows.append([self._run(trial), value, *words, outcome])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if any(trial.state is TrialState.COMPLETE for trial in self._study.trials):
            best = self._study.best_trial
            values = {name: best.params[name] for name in self.file.parameters}
            lines.append(f"best: {self._run(best)}  {' '.join(self.file.flags(values))}")
        return "\n".join(lines)


def evaluations(rows: Path, metric: str) -> Iterator[tuple[int, float]]:
    """Step and value of each row of a metrics.jsonl that has the metric; NaN for null."""
    for line in rows.read_text().splitlines() if rows.exists() else ():
        if f'"{metric}"' in line and line.endswith("}"):  # the last line may be half written
            row = json.loads(line)
            yield row["step"], math.nan if row[metric] is None else float(row[metric])


@contextlib.contextmanager
def locked(path: Path, refusal: str = "") -> Iterator[None]:
    """Hold the lock of a file. If another process holds it, wait, or raise `Refused` with `refusal`."""
    with path.open("ab+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except OSError:
            raise Refused(refusal) from None
        yield


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _end_with_parent() -> None:
    """In the child, on Linux: if this process is killed, the launcher is asked to end, so that its run saves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
