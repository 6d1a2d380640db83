"""Start table: what a run prints about itself before its first step, and the sizes that it records."""

from pathlib import Path
from typing import Any

import torch

from common.config.parsing import get_identity
from common.data import duplicates
from common.data.batch_plan import BatchPlan
from common.data.data_spec import describe_data
from common.distributed import sharding, watchdog
from common.distributed.collectives import is_main
from common.training import batch_norm, timm_models
from common.training.freezing import Freezing
from common.training.step import TrainDataset, describe_step_modules


def build_start_table(
    config: Any,
    model: torch.nn.Module,
    train_set: TrainDataset,
    val: Any,
    *,
    plan: BatchPlan,
    total_steps: int,
    rates: str,
    freezing: Freezing,
    layout: str,
    folder: Path,
    trial: dict[str, str],
) -> dict[str, str]:
    """Rows of the start table in their order, name and value; those without a value are left out.

    `val` is the source that is evaluated, `rates` describes schedule and optimizers, `layout`
    processes and precision, and `trial` has rows about the trial of a step. With --dry_run the main
    process looks for duplicates, so its table has more rows than the others', which print none.
    """
    train = train_set.source
    rows = describe_data(config.data, train, val)
    rows |= timm_models.describe_model(config.model, model)
    rows |= train_set.describe()
    rows |= describe_step_modules(model)
    rows["batch norm"] = batch_norm.describe_batch_norm(model)
    rows |= sharding.describe_sharding(model)
    rows["batch"] = str(plan)
    rows["learning rate"] = rates
    rows["settings"] = _describe_settings(config)
    rows["length"] = _describe_length(config, train_set, total_steps)
    rows |= freezing.describe()
    rows["layout"] = layout
    rows["run folder"] = str(folder)
    rows |= trial
    if config.dry_run and is_main():
        watchdog.note("looking for duplicates")
        rows |= duplicates.describe_duplicates(train, val)
    return {name: value for name, value in rows.items() if value}


def get_sizes(
    model: torch.nn.Module, train_set: TrainDataset, val: Any, plan: BatchPlan
) -> dict[str, Any]:
    """Sizes of data, model and batches, for environment.json."""
    train = train_set.source
    sizes: dict[str, Any] = {
        "train_images": len(train),
        "val_images": len(val),
        "classes": len(train.classes),
    }
    sizes |= getattr(train_set, "sizes", {})
    sizes["micro_batch_size"] = plan.micro_batch_sizes[0]
    sizes["micro_steps"] = plan.micro_steps
    if plan.undivided_for:
        sizes["undivided_for"] = plan.undivided_for
    sizes["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return sizes


def _describe_settings(config: Any) -> str:
    """What defines the training, is not at the recipe's default, and has no row of its own."""
    values = get_identity(config) | {"patience": config.patience}
    for name in "data model batch_norm global_batch_size lr opt schedule".split():
        values.pop(name, None)
    recipe = type(config)
    return ", ".join(
        f"{name} {value!s:.60}" for name, value in values.items() if value != getattr(recipe, name)
    )


def _describe_length(config: Any, train_set: TrainDataset, total_steps: int) -> str:
    stream = train_set.stream
    dry_run = ""
    if config.dry_run:
        dry_run = f"; the dry run makes {total_steps} of them"
        total_steps = config.max_steps
        if not total_steps:
            total_steps = stream.count_steps(config.epochs)
    text = f"{total_steps:,} steps, {stream.count_epochs(total_steps):.1f} epochs"
    if stream.extends_epochs:
        text += (
            f", counted as {total_steps / stream.min_epoch_steps:.1f} of {stream.min_epoch_steps} "
            "steps each"
        )
    return text + dry_run
