"""How many samples does the device take at once?

What is trained does not depend on it (but with `--batch_norm local`), so it may be found out: before the first step by trying,
and later by what failed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache

from common.collectives import gather_objects, together
from common.errors import Refused
from common.plan import BatchPlan
from common.run_folder import read_json, write_json
from common.wrapping import is_out_of_memory

_FILE = "micro_batch.json"


def fit(
    plan: BatchPlan, attempt: Callable[[BatchPlan], None], model: torch.nn.Module, say: Callable[[str], None]
) -> BatchPlan:
    """`plan`, its micro-batches halved until `attempt(plan)`, the largest's forward and backward pass, fits on every rank.

    A collective. While it is tried, as much memory is held as Adam's moments of `model` will take. Raises `Refused` where no
    size fits.
    """
    while True:
        size = plan.micro_batch_sizes[0]
        with together("trying a step"):
            fits = _fits(attempt, plan, model)
        if all(gather_objects(fits)):
            return plan
        plan = halved(plan)
        say(f"micro-batches of {size} do not fit into memory: {plan}")


def halved(plan: BatchPlan) -> BatchPlan:
    """The same global batch in micro-batches of at most half the size. Raises `Refused` where none is smaller."""
    size = plan.micro_batch_sizes[0]
    if size == plan.unit:
        raise Refused(
            f"not even micro-batches of {size} fit into memory: take a smaller model or --image_size, a bf16 file of "
            "accelerate_configs/, or --grad_checkpointing where the recipe has it"
        )
    return dataclasses.replace(plan, max_micro_batch_size=max(plan.unit, size // 2 // plan.unit * plan.unit))


def keep(run: Path, plan: BatchPlan, device: torch.device) -> None:
    """Write down that devices of this kind take no more at once than `plan` says."""
    write_json(run / _FILE, read_json(run / _FILE) | {_kind(device): plan.max_micro_batch_size})


def kept(run: Path, device: torch.device) -> int | None:
    """What `keep` wrote down, if anything."""
    most = read_json(run / _FILE).get(_kind(device))
    return most if isinstance(most, int) and most > 0 else None


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _fits(attempt: Callable[[BatchPlan], None], plan: BatchPlan, model: torch.nn.Module) -> bool:
    try:
        held = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
        attempt(plan)
        del held
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        model.zero_grad()  # after the error, whose traceback holds activations
        clear_device_cache(garbage_collection=True)
    return False
