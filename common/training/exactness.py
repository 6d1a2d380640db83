"""Rows of the start table about what depends on a run's layout apart from batch norm."""

from typing import Any

import timm.optim

from common.distributed.collectives import world_size

# Optimizers of timm whose step does not shrink with the gradient. All cautious ones belong here
# too: they count signs.
_SCALE_FREE_NAMES = ("lion", "laprop", "adafactor")
_SIGNIFICANT_BITS = {"fp16": 11, "bf16": 8}


def describe_exactness(config: Any, uses_generator: bool) -> dict[str, str]:
    """Rows of the start table; none if all is exact.

    `uses_generator`: a forward pass draws from the global generator.
    """
    rows = {}
    hook = config.comm_hook
    if hook != "none":
        if world_size() == 1:
            rows["gradients"] = f"one process sends none: --comm_hook {hook} does nothing here"
        else:
            rows["gradients"] = (
                f"sent in {hook}, with {_SIGNIFICANT_BITS[hook]} significant bits: layouts agree "
                "to about these"
            )
    if uses_generator:
        rows["dropout"] = (
            "the model draws masks that depend on the layout: layouts agree only statistically"
        )
    if is_scale_free(config.opt):
        rows["optimizer"] = (
            f"{config.opt} makes full-size updates even where the exact gradient is 0 (attention "
            "key biases): layouts agree only roughly"
        )
    return rows


def is_scale_free(name: str) -> bool:
    """True if the step of an optimizer of timm does not shrink with the gradient.

    Such an optimizer moves a weight (nearly) as far for a gradient of 1e-17 as for one of 1e-3.
    """
    name = name.lower()
    defaults = timm.optim.get_optimizer_info(name).defaults
    if defaults and defaults.get("caution", False):
        return True
    return any(scale_free in name for scale_free in _SCALE_FREE_NAMES)
