"""Rows of the start table about what depends on a run's layout apart from batch norm."""

from typing import Any

import timm.optim

from common.distributed.collectives import world_size

# Optimizers of timm whose step does not shrink with the gradient. All cautious ones belong here
# too: they count signs.
_SCALE_FREE = ("lion", "laprop", "adafactor")
_SIGNIFICANT_BITS = {"fp16": 11, "bf16": 8}


def describe(config: Any, uses_generator: bool) -> dict[str, str]:
    """Rows of the start table; none if all is exact. `uses_generator`: a forward pass draws from
    the global generator.
    """
    rows = {}
    if (hook := config.comm_hook) != "none":
        text = (
            f"sent in {hook}, with {_SIGNIFICANT_BITS[hook]} significant bits: layouts agree to "
            "about these"
        )
        alone = f"one process sends none: --comm_hook {hook} does nothing here"
        rows["gradients"] = alone if world_size() == 1 else text
    if uses_generator:
        rows["dropout"] = (
            "the model draws masks that depend on the layout: layouts agree only statistically"
        )
    if moves_by_noise(config.opt):
        rows["optimizer"] = (
            f"{config.opt} takes full steps where a gradient is only rounding noise, as of the "
            "bias of an attention's keys: layouts of such a model agree only roughly"
        )
    return rows


def moves_by_noise(name: str) -> bool:
    """True if an optimizer of timm moves a weight (nearly) as far for a gradient of 1e-17 as for
    one of 1e-3.
    """
    name = name.lower()
    is_cautious = (timm.optim.get_optimizer_info(name).defaults or {}).get("caution", False)
    return is_cautious or any(part in name for part in _SCALE_FREE)
