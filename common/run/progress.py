"""What has the run done so far, in numbers?"""

from dataclasses import dataclass, field

from common.run.step_reports import StepReport

_NAMES = {
    "top1": "top-1",
    "top5": "top-5",
    "f1": "F1",
    "f1_macro": "macro F1",
    "mean_class_accuracy": "mean class accuracy",
}


def display_name(key: str) -> str:
    """The name of a result for people: eval/top1 -> top-1, eval/ema_AP -> AP (EMA)."""
    name = key.removeprefix("eval/")
    metric = name.removeprefix("ema_")
    return _NAMES.get(metric, metric) + " (EMA)" * (metric != name)


@dataclass
class Progress:
    """Totals over all starts of a run. They travel in its checkpoints, so that a resumed run goes on counting."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of training: without start-up, evaluation and checkpoints
    skipped: int = 0  # steps that an fp16 overflow left without effect
    broken: int = 0  # training images that could not be read
    broken_in_window: int = 0  # of them, in the present window of the stream
    best: dict = field(default_factory=dict)  # the best evaluation: step and eval/...
    last: dict = field(default_factory=dict)  # the newest one
    leading: str = ""  # the result that decides which is best
    ended_by: str = ""  # why the recipe ended the run before its length, if it did

    def __post_init__(self):
        for name, value in vars(self).items():  # they come from a file
            kind = self.__annotations__[name]
            if not isinstance(value, (int, float) if kind is float else kind):
                raise TypeError(f"{name} is {value!r:.40}")
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0  # since the last row

    def take_in(self, report: StepReport, seconds: float) -> None:
        """Count a step that took `seconds`."""
        self.seconds += seconds
        self.skipped += report.skipped
        self._steps += 1
        self._seconds += seconds
        self._waited += report.data_wait

    def pace(self, samples_per_step: int) -> dict[str, float]:
        """Images per second over all processes and the share of time spent waiting for data, since the last call."""
        pace = {
            "perf/images_per_second": self._steps * samples_per_step / self._seconds,
            "perf/data_wait": self._waited / self._seconds,
        }
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        return pace

    def judge(self, step: int, results: dict[str, float], leading: str) -> bool:
        """Keep an evaluation's results; whether `results[leading]` (larger is better) is the best so far."""
        self.last, self.leading = {"step": step} | results, leading
        better = not self.best or (results[leading] or 0) > (self.best.get(leading) or 0)
        if better:
            self.best = self.last
        return better

    def headline(self, results: dict[str, float]) -> str:
        """The leading result for people, such as `top-1 99.72 %`."""
        value = results[self.leading]
        return display_name(self.leading) + (" unknown" if value is None else f" {value:.2%}".replace("%", " %"))
