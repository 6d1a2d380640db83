"""Multi-scale training: the size that all images of a step have, a function of the step."""

from dataclasses import dataclass

import numpy as np

from common.config.fields import whole_numbers
from common.errors import Refused
from common.randomness import key_of, uniforms

_LARGEST = 8192  # pixels, as of --image_size


@dataclass(frozen=True)
class StepSizes:
    """One of `choices` (heights and widths in pixels) for each step, a function of the step."""

    choices: tuple[tuple[int, int], ...]
    seed: int = 0
    global_batch_size: int = 1

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Height and width at `positions` int[n] of the stream: int64[n, 2]."""
        shares = uniforms(positions // self.global_batch_size, key_of(self.seed, "image size"))
        return np.array(self.choices)[(shares * len(self.choices)).astype(int)]

    @property
    def largest(self) -> tuple[int, int]:
        return max(self.choices)

    def __str__(self) -> str:
        *others, last = (f"3 x {height} x {width}" for height, width in self.choices)
        return f"{', '.join(others)} or {last}, drawn for each step" if others else last


def step_sizes(config, data_config: dict) -> StepSizes:
    """The sizes of `--image_sizes`; by default `data_config["input_size"]` ([3, H, W]) in all steps."""
    choices = tuple((side, side) for side in whole_numbers(config.image_sizes, ","))
    if config.image_sizes and not (choices and all(1 <= side <= _LARGEST for side, _ in choices)):
        raise Refused(
            f"--image_sizes {config.image_sizes:.100}: must be sides of squares in pixels joined by commas, such as "
            f"160,192,224, each at most {_LARGEST}"
        )
    choices = choices or (tuple(data_config["input_size"][1:]),)
    return StepSizes(tuple(sorted(set(choices))), config.seed, config.global_batch_size)
