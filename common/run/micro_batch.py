"""Search for the micro-batch that fits into memory: by a trial before the first step, and by
halving after a failure.

The size does not change the training, except with `--batch_norm local`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch
from accelerate.utils.memory import clear_device_cache
from torch.distributed.tensor import DTensor

from common.data.batch_plan import BatchPlan
from common.distributed import devices
from common.distributed.collectives import all_or_none, gather_objects
from common.distributed.sharding import is_sharded
from common.errors import Refused
from common.run.folder import read_json, write_json
from common.training.step import TrainingStep
from common.training.warm_up import first_line, is_out_of_memory, warm_up

_FILE = "micro_batch.json"


def fit(
    plan: BatchPlan, training: TrainingStep, say: Callable[[str], None]
) -> tuple[BatchPlan, str]:
    """Halve the micro-batches of `plan` until a forward and backward pass of the largest fits on
    every rank. A collective.

    Returns that plan, and a text for people: "1.2 of 16 GiB at the peak of a step", of the rank
    with the smallest reserve, "" on the CPU. During a trial, as much memory is held as the model's
    gradients and Adam's moments will take. Raises `Refused` if no size fits.
    """
    while True:
        size = plan.micro_batch_sizes[0]
        with all_or_none("trying a step"):
            mine = _tried(plan, training)
        failures, peaks, rooms = zip(*gather_objects(mine), strict=True)
        if not any(failures):
            peak, room = max(zip(peaks, rooms, strict=True), key=lambda taken: taken[0] / taken[1])
            return (
                plan,
                f"{peak / 2**30:.3g} of {room / 2**30:.3g} GiB at the peak of a step"
                if peak
                else "",
            )
        plan = halve(plan, "; " + shorten(next(filter(None, failures)), 100, placeholder=" ..."))
        say(f"micro-batches of {size} do not fit into memory: {plan}")


def halve(plan: BatchPlan, why: str = "") -> BatchPlan:
    """The same global batch in micro-batches of at most half the size. Raises `Refused`, with
    `why`, where none is smaller.
    """
    size = plan.micro_batch_sizes[0]
    if plan.undivided_for:
        raise Refused(
            f"the {size} samples that {plan.undivided_for} needs at once do not fit into memory: "
            "take --batch_norm group, a smaller model or smaller images, more processes, or a "
            f"bf16 file of accelerate_configs/{why}"
        )
    if size == plan.unit:
        raise Refused(
            f"not even micro-batches of {size} fit into memory: take a smaller model or smaller "
            "images, a bf16 file of accelerate_configs/ (fsdp_bf16.yaml: shards of the model), "
            f"or --grad_checkpointing where the recipe has it{why}"
        )
    return dataclasses.replace(
        plan, max_micro_batch_size=max(plan.unit, size // 2 // plan.unit * plan.unit)
    )


def save_limit(run: Path, plan: BatchPlan, device: torch.device) -> None:
    """Record in the run folder that devices of this kind take at most the micro-batches of `plan`."""
    write_json(
        run / _FILE,
        read_json(run / _FILE) | {devices.get_device_name(device): plan.max_micro_batch_size},
    )


def load_limit(run: Path, device: torch.device) -> int | None:
    """The largest micro-batch that `save_limit` recorded for devices of this kind, if it did."""
    limit = read_json(run / _FILE).get(devices.get_device_name(device))
    return limit if isinstance(limit, int) and limit > 0 else None


def _tried(plan: BatchPlan, training: TrainingStep) -> tuple[str, int, int]:
    """Why memory was too small for a pass, or ""; bytes at its peak; bytes of the device."""
    taken, room, failure, model = 0, 1, "", training.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_known = any(devices.has_streams(parameter.device) for parameter in parameters)
    if is_known:
        torch.accelerator.reset_peak_memory_stats()
    try:
        # The warm-up's copy of the weights counts as one of Adam's moments. DDP's buckets lie
        # beside accumulated gradients.
        copies = 1 + (plan.world_size > 1 and plan.micro_steps > 1 and not is_sharded(model))
        held = [torch.empty_like(parameter) for parameter in parameters for _ in range(copies)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # of earlier micro-batches
        warm_up(model, model, partial(training.attempt, model, plan))
        # An optimizer step has no activations, but gradients, both of Adam's moments, and a copy
        # for the size of the update.
        held += [
            torch.empty_like(each)
            for each in parameters
            if not isinstance(each, DTensor)
            for _ in range(3)
        ]
        del held
        if is_known:
            taken, room = torch.accelerator.max_memory_allocated(), devices.get_memory_info()[1]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = first_line(error)
    finally:
        model.zero_grad()  # after the error, whose traceback holds activations
        clear_device_cache(garbage_collection=True)
    return failure, taken, room
