"""Broken images: counts training images that could not be read, and stops a run with too many of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.errors import Refused
from common.run.progress import MOST_NAMED, Progress

_WINDOW = 1_000  # smallest number of samples over which the share is computed


@dataclass
class BrokenImages:
    """Counts over fixed windows of the stream, so that any layout, also after a resume, stops at the same step."""

    progress: Progress
    max_share: float
    global_batch_size: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._named = set(self.progress.broken_names)

    def count(self, step: int, names: Iterable[str]) -> None:
        """Count the broken images `names` of `step` (from 1), of all ranks. Raises `Refused` beyond `max_share` of a window."""
        names = list(names)
        steps = -(-_WINDOW // self.global_batch_size)
        window = steps * self.global_batch_size
        if (step - 1) % steps == 0:
            self.progress.broken_in_window = 0
        self.progress.broken += len(names)
        self.progress.broken_in_window += len(names)
        for name in dict.fromkeys(names):
            if name not in self._named:
                self._named.add(name)
                self.progress.broken_names += [name] * (len(self.progress.broken_names) <= MOST_NAMED)
                self.say(f"can't be read, a stand-in takes its place: {name}")
        if self.progress.broken_in_window > self.max_share * window:
            seen = ((step - 1) % steps + 1) * self.global_batch_size
            raise Refused(
                f"step {step}: {self.progress.broken_in_window:,} of the last {seen:,} images could not be read "
                f"(the last: {names[-1] if names else '-'}), more than --max_broken_share {self.max_share} of each {window:,}: "
                "mend the data, or raise the limit"
            )
