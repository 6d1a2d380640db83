"""Find training labels and boxes that a trained model contradicts: likely wrong, or worth a look.

    python -m tools.audit runs/digits

The model of the newest checkpoint predicts all images that the run has trained on. RUN gets
suspicious.csv and pictures/suspicious.png. A detector memorises wrong boxes late in a run: train it
with --keep_for_audit, whose checkpoint this tool takes. Flags that are not listed are the recipe's:
--data FOLDER, --workers 4. On several devices: accelerate launch --config_file
accelerate_configs/multi_gpu.yaml -m tools.audit runs/digits
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import Refused
from tools.command_line import create_parser, hide_unset_flag, refuse_unwritable


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("audit", __doc__)
    parser.add_argument("run", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="write there, not into the run folder"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options, flags = build_parser().parse_known_args(argv)
    # Imported late: torch takes seconds, which --help need not.
    import torch

    from common.distributed import is_main
    from common.launching import launch
    from common.run import plots
    from tools.audit import boxes, labels
    from tools.trained import load

    checkpoint = choose_checkpoint(options.run)
    trained = load(str(checkpoint), flags, reads_data=True)
    accelerator = launch.start(trained.config)
    train_data = trained.recipe.build_data(trained.config)[0]
    if train_data.fresh:
        raise Refused(
            f"{options.run}: its scenes are drawn anew for each step, so no label can be wrong"
        )
    if tuple(train_data.classes) != tuple(trained.classes):
        raise Refused(
            f"--data {trained.config.data}: has other classes than {checkpoint} was trained on; "
            "name the data that the run was trained on"
        )
    model, batches = trained.build(train_data, accelerator)
    task = boxes if trained.is_detector else labels
    with torch.compiler.set_stance("force_eager"):
        predictions = trained.predict(model, batches)
        suspects = task.find_suspects(train_data, predictions, accelerator.device)
    if not is_main():
        return
    folder = options.output or checkpoint.absolute().parents[1]
    picture = folder / "pictures" / "suspicious.png"
    plots.attempt(picture, launch.print_on_main, task.draw_sheet, train_data, suspects)
    table = write_table(folder / "suspicious.csv", task.build_table(train_data, suspects))
    summary = task.summarize(train_data, suspects)
    launch.print_on_main(f"{checkpoint}: {summary}: {table}, {picture}")


def choose_checkpoint(path: Path) -> Path:
    """Choose the checkpoint `path` itself, or one of the run `path`. Raises `Refused`.

    Of a run, the checkpoint that was kept for the audit is taken, else the newest.
    """
    from common.checkpoints import Checkpoints
    from common.checkpoints.store import AUDIT_FOLDER

    if (path / "record.json").is_file():
        return path
    for name in (AUDIT_FOLDER, "checkpoints"):
        checkpoints = Checkpoints(path / name).list_paths()
        if checkpoints:
            return checkpoints[0]
    raise Refused(
        f"{path}: no checkpoint in its checkpoints/; name a run folder that has one, or a "
        "checkpoint"
    )


def write_table(path: Path, rows: Iterable[Sequence]) -> Path:
    """Write a CSV file. Raises `Refused` if that is not possible."""
    from common.durable import make_folder, write_csv

    with refuse_unwritable(f"--output {path.parent}"):
        make_folder(path.parent)
        write_csv(path, rows)
    return path


if __name__ == "__main__":
    sys.argv[0] = "audit"  # what messages begin with
    from common.launching import launch

    launch.run(hide_unset_flag()(main))
