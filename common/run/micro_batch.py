"""Finds the micro-batch that fits into memory: by a trial before the first step, and after failures.

The size does not change the training, except with `--batch_norm local`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

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
from common.training.warm_up import is_out_of_memory, summarize_error, warm_up

_FILE = "micro_batch.json"


def fit(
    plan: BatchPlan, training: TrainingStep, say: Callable[[str], None]
) -> tuple[BatchPlan, str]:
    """Halve the micro-batches of `plan` until a training step of the largest fits on every rank.

    A collective.

    Returns that plan, and a text for people: "1.2 of 16 GiB at the peak of a step", of the rank
    with the smallest reserve, "" on the CPU. During a trial, as much memory is held as the model's
    gradients and Adam's moments will take. Raises `Refused` if no size fits.
    """
    while True:
        size = plan.micro_batch_sizes[0]
        with all_or_none("trying a step"):
            trial = _try_step(plan, training)
        trials = [_Trial(*values) for values in gather_objects(trial)]
        failures = [trial.failure for trial in trials if trial.failure]
        if not failures:
            return plan, _format_peak(trials)
        plan = halve(plan, "; " + shorten(failures[0], 100, placeholder=" ..."))
        say(f"micro-batches of {size} do not fit into memory: {plan}")


def halve(plan: BatchPlan, why: str = "") -> BatchPlan:
    """The same global batch in micro-batches of at most half the size.

    Raises `Refused`, with `why`, where none is smaller.
    """
    size = plan.micro_batch_sizes[0]
    if plan.undivided_for:
        raise Refused(
            f"the {size} samples that {plan.undivided_for} needs at once do not fit into memory: "
            "take --batch_norm group, a smaller model or smaller images, more processes, or a "
            f"bf16 file of accelerate_configs/{why}"
        )
    if size == plan.unit_size:
        raise Refused(
            f"not even micro-batches of {size} fit into memory: take a smaller model or smaller "
            "images, a bf16 file of accelerate_configs/ (fsdp_bf16.yaml: shards of the model), "
            f"or --grad_checkpointing where the recipe has it{why}"
        )
    half = size // 2 // plan.unit_size * plan.unit_size
    return dataclasses.replace(plan, max_micro_batch_size=max(plan.unit_size, half))


def save_limit(run: Path, plan: BatchPlan, device: torch.device) -> None:
    """Record in the run folder that devices of this kind take at most the micro-batches of `plan`."""
    limits = read_json(run / _FILE)
    limits[devices.get_device_name(device)] = plan.max_micro_batch_size
    write_json(run / _FILE, limits)


def load_limit(run: Path, device: torch.device) -> int | None:
    """The largest micro-batch that `save_limit` recorded for devices of this kind, if it did."""
    limit = read_json(run / _FILE).get(devices.get_device_name(device))
    return limit if isinstance(limit, int) and limit > 0 else None


class _Trial(NamedTuple):
    """A trial of a step on one rank."""

    failure: str = ""  # why memory was too small
    peak_bytes: int = 0
    device_bytes: int = 1


def _format_peak(trials: list[_Trial]) -> str:
    """The peak of the rank with the smallest reserve, as text; "" on the CPU."""
    fullest = max(trials, key=lambda trial: trial.peak_bytes / trial.device_bytes)
    if not fullest.peak_bytes:
        return ""
    peak = fullest.peak_bytes / 2**30
    return f"{peak:.3g} of {fullest.device_bytes / 2**30:.3g} GiB at the peak of a step"


def _try_step(plan: BatchPlan, training: TrainingStep) -> _Trial:
    """Make the passes of the largest micro-batch, with as much memory held as training will take."""
    model = training.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_statistics = any(devices.has_streams(parameter.device) for parameter in parameters)
    if has_statistics:
        torch.accelerator.reset_peak_memory_stats()
    try:
        # The warm-up's copy of the weights counts as one of Adam's moments. DDP's buckets lie
        # beside accumulated gradients.
        has_buckets = plan.world_size > 1 and plan.micro_steps > 1 and not is_sharded(model)
        held = []
        for parameter in parameters:
            held.append(torch.empty_like(parameter))
            if has_buckets:
                held.append(torch.empty_like(parameter))
            parameter.grad = torch.zeros_like(parameter)  # of earlier micro-batches
        warm_up(model, model, partial(training.run_trial, model, plan))
        # An optimizer step has no activations, but gradients, both of Adam's moments, and a copy
        # for the size of the update.
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                held += [torch.empty_like(parameter) for _ in range(3)]
        del held
        if not has_statistics:
            return _Trial()
        peak_bytes = torch.accelerator.max_memory_allocated()
        return _Trial(peak_bytes=peak_bytes, device_bytes=devices.get_memory_info()[1])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _Trial(failure=summarize_error(error))
    finally:
        model.zero_grad()  # after the error, whose traceback holds activations
        clear_device_cache(garbage_collection=True)
