"""Progress of a run: totals over all starts, and its best and last evaluation."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config.fields import RunConfig
from common.errors import Refused
from common.run.step_reports import StepReport

# A run is also shown without its recipe (tools.report, tools.compare), and a recipe of one's own
# registers nothing. So how a result is read follows from its name alone, by these tables: names
# that are not in them are shown as they are.
_NAMES = {
    "ece": "calibration error (ECE)",
    "top1": "top-1",
    "top5": "top-5",
    "f1": "micro F1",
    "f1_macro": "macro F1",
    "mean_class_accuracy": "mean class accuracy",
    "pixel_accuracy": "pixel accuracy",
    "recall_at_1": "recall@1",
    "verification_accuracy": "verification accuracy",
}
_SHARES = re.compile(
    r"top\d+|f1(_macro)?|(\w+_)?accuracy|exact_match|precision|recall(_at_1)?|ece|m?(AP|IoU).*|AR.*"
    r"|(accuracy|f1)_class/.*"
)
# Up to so many classes have results of their own: rows of metrics.jsonl stay below 10 kB.
_NAMED_CLASSES = 100
# A result of an evaluation -> what `per_class` then is; else accuracy.
_CLASS_RESULTS = {"AP": "AP", "f1": "F1", "mIoU": "IoU"}
# Are better if they are lower.
_LOWER = {"loss", "ece", "error", "nll", "brier", "perplexity", "mae", "mse", "rmse"}

MOST_NAMED = 10_000  # a checkpoint keeps no more names of broken images
_WINDOW = 1_000  # samples of the stream over which at least the share of broken images is computed


def display_name(key: str) -> str:
    """The display name of a result: eval/top5 -> top-5, eval/ema_loss -> loss (EMA).

    Of weights that an average was made of: raw_loss -> loss (without EMA).
    """
    name = key.removeprefix("eval/")
    metric = metric_of(key)
    title = _NAMES.get(metric, metric)
    if metric == name:
        return title
    return f"{title} (EMA)" if name.startswith("ema_") else f"{title} (without EMA)"


def metric_of(key: str) -> str:
    """A result's own name, whichever weights it is of: eval/ema_loss -> loss, raw_loss -> loss."""
    return key.removeprefix("eval/").removeprefix("ema_").removeprefix("raw_")


def is_share(key: str) -> bool:
    """True for a share of 1, which people read in per cent: eval/top5, but not eval/loss."""
    return bool(_SHARES.fullmatch(metric_of(key)))


def direction_of(key: str) -> bool | None:
    """True if a larger value of the result `key` is better; None for a name that is not known."""
    return False if metric_of(key) in _LOWER else is_share(key) or None


def _signed(value: float | None, sign: int) -> float:
    """`sign` times the value; -inf if it is unknown or not finite."""
    return -math.inf if value is None or not math.isfinite(value) else sign * value


def get_shown_metrics(leading: str) -> tuple[str, str]:
    """The results that lines and curves show beside the loss: the `leading` one, and its NAME50 (AP50).

    Most evaluations have no result of the second name, such as AP50.
    """
    metric = metric_of(leading)
    return metric, f"{metric}50"


def class_result_name(results: Mapping[str, Any]) -> str:
    """The display name of the `per_class` results of an evaluation with these results."""
    for metric, name in _CLASS_RESULTS.items():
        if metric in results:
            return name
    return "accuracy"


def name_by_class(metric: str, classes: Sequence[str], values: Any) -> dict[str, float]:
    """Results `metric_class/NAME` of the classes that have a value; none if they are many."""
    if len(classes) > _NAMED_CLASSES:
        return {}
    named = zip(classes, values, strict=False)
    return {f"{metric}_class/{name}": value for name, value in named if value is not None}


def of_exported(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an evaluation under plain names, the exported weights' (`best/`) first.

    With a moving average, the average is exported; results of the weights that it averages follow
    as `raw_...`: {"eval/loss": 0.97, "eval/ema_loss": 0.94} -> {"loss": 0.94, "raw_loss": 0.97}
    """
    plain = {key.removeprefix("eval/"): value for key, value in results.items()}
    averaged = {
        key.removeprefix("ema_"): value for key, value in plain.items() if key.startswith("ema_")
    }
    if not averaged:
        return plain
    raw = {f"raw_{key}": value for key, value in plain.items() if not key.startswith("ema_")}
    return averaged | raw


@dataclass
class Progress:
    """Totals over all starts of a run. Checkpoints save them, so that a resumed run continues to count."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of training: without start-up, evaluation and checkpoints
    skipped: int = 0  # steps that were skipped after an fp16 overflow
    broken: int = 0  # draws of training images that could not be read
    # Which images these were, each once; up to MOST_NAMED and one.
    broken_names: list = field(default_factory=list)
    broken_in_window: int = 0  # the same in the present window of the stream
    best: dict = field(default_factory=dict)  # the best evaluation: step and eval/...
    last: dict = field(default_factory=dict)  # the newest one
    leading: str = ""  # the result that decides which evaluation is the best
    larger_is_better: bool = True  # of that result
    since_best: int = 0  # evaluations since the leading result became better
    improved_step: int = 0  # the step of that evaluation
    owes_evaluation: bool = False  # one that a signal ended, to be made after the next step
    ended_by: str = ""  # why the run ended early, if it did: by the recipe's word or by a flag

    def __post_init__(self):
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0  # since the last row
        self._named = set(self.broken_names)
        # Of a version that did not keep it.
        if not self.improved_step:
            self.improved_step = self.best.get("step", 0)

    def record_step(self, report: StepReport, seconds: float) -> None:
        """Count a step that took `seconds`."""
        self.seconds += seconds
        self.skipped += report.skipped
        self._steps += 1
        self._seconds += seconds
        self._waited += report.data_wait

    def count_broken(
        self, step: int, names: Sequence[str], config: RunConfig, say: Callable[[str], None]
    ) -> None:
        """Count the broken images `names` of `step` (from 1), of all ranks; new ones are named.

        Raises `Refused` if more than `config.max_broken_share` of a fixed window of the stream are
        broken, so that any layout, also after a resume, stops at the same step.
        """
        size = config.global_batch_size
        limit = config.max_broken_share
        steps = math.ceil(_WINDOW / size)
        if (step - 1) % steps == 0:
            self.broken_in_window = 0
        self.broken += len(names)
        self.broken_in_window += len(names)
        for name in dict.fromkeys(names):
            if name not in self._named:
                self._named.add(name)
                if len(self.broken_names) <= MOST_NAMED:
                    self.broken_names.append(name)
                say(f"can't be read, a stand-in takes its place: {name}")
        if self.broken_in_window > limit * steps * size:
            num_images = ((step - 1) % steps + 1) * size
            last = names[-1] if names else "-"
            raise Refused(
                f"step {step}: {self.broken_in_window:,} of the last {num_images:,} images could "
                f"not be read (the last: {last}), more than --max_broken_share {limit} of each "
                f"{steps * size:,}: mend the data, or raise the limit"
            )

    def pace(self, samples_per_step: int, ready: Sequence[float]) -> dict[str, float]:
        """Images per second over all processes, and the share of time waiting for data, since the last call.

        Of several processes, which was `ready` last with its gradients (`StepReport`), and the
        share of time that it took longer than all of them on average.
        """
        pace = {
            "perf/images_per_second": self._steps * samples_per_step / self._seconds,
            "perf/data_wait": self._waited / self._seconds,
        }
        if len(ready) > 1:
            slowest = max(range(len(ready)), key=ready.__getitem__)
            lag = (ready[slowest] - sum(ready) / len(ready)) / self._seconds
            pace |= {"perf/slowest_rank": slowest, "perf/slowest_rank_lag": lag}
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        return pace

    def record_evaluation(
        self, step: int, results: dict[str, float], leading: str, larger_is_better: bool = True
    ) -> bool:
        """Record the results of an evaluation; returns whether they are the best so far.

        `leading` is the name of the result that decides.
        """
        self.last = {"step": step} | results
        self.leading = leading
        self.larger_is_better = larger_is_better
        rank = self._rank(results)
        best_rank = self._rank(self.best)
        if not self.best or rank[0] > best_rank[0]:
            self.improved_step = step
            self.since_best = 0
        else:
            self.since_best += 1
        # Equal results go to the lower loss, then to the later step.
        is_best = not self.best or rank >= best_rank
        if is_best:
            self.best = self.last
        return is_best

    def _rank(self, results: Mapping[str, float]) -> tuple[float, float]:
        """The leading result and the loss of the same weights, as numbers of which the larger is better.

        What is not finite is -inf.
        """
        prefix = self.leading.removesuffix(metric_of(self.leading))
        sign = 1 if self.larger_is_better else -1
        return _signed(results.get(self.leading), sign), _signed(results.get(f"{prefix}loss"), -1)

    @property
    def broken_files(self) -> int | None:
        """Number of training images that could not be read; None if too many to keep their names."""
        return len(self.broken_names) if len(self.broken_names) <= MOST_NAMED else None

    @property
    def ended_by_flag(self) -> str:
        """The flag that ended the run, patience or max_hours; "" if none did."""
        return next(
            (flag for flag in ("patience", "max_hours") if self.ended_by.startswith(f"--{flag} ")),
            "",
        )

    def exhausted(self, config: RunConfig) -> str:
        """Why the run ends by a flag of `config`: the flag, its value and the reason; "" if it does not."""
        if 0 < config.patience <= self.since_best:
            return (
                f"--patience {config.patience}: no better {display_name(self.leading)} since step "
                f"{self.improved_step}"
            )
        if 0 < 3600 * config.max_hours <= self.seconds:
            return f"--max_hours {config.max_hours:g}"
        return ""

    def headline(self, results: dict[str, float]) -> str:
        """The leading result as text, such as `top-1 99.72 %` or `loss 0.0312`."""
        value = results[self.leading]
        if value is None:
            figure = "unknown"
        elif is_share(self.leading):
            figure = f"{100 * value:.2f} %"
        else:
            figure = f"{value:.5g}"
        return f"{display_name(self.leading)} {figure}"
