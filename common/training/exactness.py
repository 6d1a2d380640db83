"""Rows of the start table about what depends on a run's layout apart from batch norm, and by how much."""

from collections.abc import Callable

import timm.optim
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.distributed import gradient_compression
from common.training.warm_up import warm_up

# Optimizers of timm whose step does not shrink with the gradient. All cautious ones belong here too: they count signs.
_SCALE_FREE = ("lion", "laprop", "adafactor")
_ELSEWHERE = ("bnb", "fused")  # bitsandbytes and apex, which need CUDA


def describe(config, model: nn.Module, step: Callable[..., None]) -> dict[str, str]:
    """Rows of the start table; none if all is exact. `step()` makes a forward and backward pass."""
    rows = gradient_compression.describe(config)
    if getattr(config, "drop", 0):
        rows["dropout"] = "masks depend on the layout: layouts agree only statistically"
    if config.opt.lower().startswith(_ELSEWHERE):
        rows["optimizer"] = f"{config.opt}: whether layouts agree was not measured"
    elif moves_by_noise(config.opt):
        rows["optimizer"] = (
            f"{config.opt} takes full steps where a gradient is only rounding noise, as of the bias of an attention's keys: "
            "layouts of such a model agree only roughly"
        )
    if config.dtype == "float64" and (kinds := narrowing_modules(model, step)):
        rows["float64"] = f"{', '.join(kinds)} compute in float32 inside: layouts agree to about 1e-6"
    return rows


def moves_by_noise(name: str) -> bool:
    """Whether an optimizer of timm moves a weight (nearly) as far for a gradient of 1e-17 as for one of 1e-3."""
    name = name.lower()
    is_cautious = (timm.optim.get_optimizer_info(name).defaults or {}).get("caution", False)
    return is_cautious or any(part in name for part in _SCALE_FREE)


def narrowing_modules(model: nn.Module, step: Callable[..., None]) -> list[str]:
    """Classes of the modules of a float64 model that compute in a narrower type internally."""
    running, found = [], set()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            narrows = function is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
            if narrows and result.is_floating_point() and result.dtype != torch.float64 and running:
                found.add(type(running[-1]).__name__)
            return result

    begin = nn.modules.module.register_module_forward_pre_hook(lambda module, _: running.append(module))
    end = nn.modules.module.register_module_forward_hook(lambda *_: running.pop() and None, always_call=True)
    try:
        with torch.compiler.set_stance("force_eager"), Casts():
            warm_up(model, model, step)
    finally:
        begin.remove()
        end.remove()
    return sorted(found)
