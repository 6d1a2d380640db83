"""Export a trained model for a runtime, and prove that it is the model that was measured.

    python -m tools.export runs/NAME/best --to onnx

Pictures go in as uint8 of any size, classes or boxes come out: resizing, normalising and box
decoding are inside. Both models are compared on the validation set, and a file that differs from
the trained model is refused. The folder gets the model, export.json, ten test vectors, and
verify.py, which repeats the check with the runtime alone. Other flags are the recipe's: --data
FOLDER, --workers 4. Of a run of your own copy, name that: --recipe mine.py.
"""

import argparse
import dataclasses
import os
from pathlib import Path

from common.errors import Refused
from tools.command_line import create_parser, run

FORMATS = ("onnx", "torch_export", "openvino")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("export", __doc__)
    parser.add_argument(
        "model", help="a run folder (its best/), a checkpoint, or an exported folder"
    )
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument(
        "-o", "--output", type=Path, help="the folder (default: export/FORMAT in the run folder)"
    )
    parser.add_argument(
        "--differing", type=int, default=0, help="images that may differ (default: 0)"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args, flags = build_parser().parse_known_args(argv)
    from tools.export import formats, proof  # takes seconds, which --help need not

    formats.FORMATS[args.to].check(args.to)
    folder = args.output or choose_folder(Path(args.model), args.to)
    proof.check_folder(folder)
    task = load_task(args.model, flags, args.differing)
    about = proof.export(task, args.to, folder)
    figures = ", ".join(f"{key} {value:.6g}" for key, value in about["validation"].items())
    print(f"{folder / about['model']}: {figures}\ncheck it again: python {folder / 'verify.py'}")


def choose_folder(model: Path, name: str) -> Path:
    """Choose export/FORMAT in the run folder; beside a folder that is in no run."""
    if (model / "config.yaml").is_file():
        return model / "export" / name
    run = model.parent.parent if model.parent.name == "checkpoints" else model.parent
    return run / "export" / name


def load_task(model: str, flags: list[str], max_differing: int):
    """Load the trained model and its validation images, which the run or `flags` name.

    Raises `Refused`.
    """
    import torch

    from common.launching import launch
    from common.run import eval_only
    from tools.trained import load

    trained = load(model, flags, reads_data=True, takes_segmenters=True)
    # What changes how a model computes, but not what, and can't be exported.
    names = [name for name in ("compile", "grad_checkpointing") if hasattr(trained.config, name)]
    config = dataclasses.replace(trained.config, **dict.fromkeys(names, False))
    trained = dataclasses.replace(trained, config=config)
    accelerator = launch.start(trained.config)
    if accelerator.num_processes > 1 or accelerator.mixed_precision != "no":
        started = (
            f"{accelerator.num_processes} processes, mixed precision {accelerator.mixed_precision}"
        )
        raise Refused(
            f"started as {started}: an export compares one process in float32; start it with "
            "python -m"
        )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    eval_only.announce(trained.config, trained.origin)
    val = trained.load_data()
    if trained.is_detector:
        from tools.export.detector import DetectorTask

        return DetectorTask(trained, val, accelerator)
    if trained.is_segmenter:
        from tools.export.segmenter import SegmenterTask

        return SegmenterTask(trained, val, accelerator)
    from tools.export.classifier import ClassifierTask

    return ClassifierTask(trained, val, accelerator, max_differing)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    run(main)
