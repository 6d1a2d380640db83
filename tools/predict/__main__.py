"""Predict: what a trained model sees in images, one row per image, in the order given.

    python -m tools.predict runs/cls-d55fba photos/ 'more/*.jpg' --top 3 -o predictions.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml -m tools.predict \
        runs/det-3b73b6 photos/ --draw drawn
    python -m tools.predict runs/cls-d55fba --data 'https://example.org/photos-{000..127}.tar' \
        --format csv -o predictions.csv

Images are read and resized as in evaluation. Flags that are not listed here are the recipe's and
stand last: --workers 8. Of a run of your own copy, name that: --recipe mine.py.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import Refused, make_printable
from common.launching import launch
from tools.command_line import create_parser, hide_unset_flag


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("predict", __doc__)
    parser.add_argument(
        "model",
        help="a run folder, its best/, a checkpoint, an exported folder; as --eval_only takes it",
    )
    parser.add_argument(
        "images",
        nargs="*",
        help="files, folders, 'globs'; @FILE and -: a list of them in FILE or on stdin",
    )
    parser.add_argument(
        "--data",
        metavar="SHARDS",
        help=(
            "tars or Parquet instead, as recipes take them: a pattern, a URL, or owner/name with "
            "--streaming"
        ),
    )
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="the file to write (default: stdout)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--format",
        choices=("jsonl", "csv", "coco"),
        default="jsonl",
        help="coco: of detectors, with --images_of",
    )
    parser.add_argument(
        "--images_of", metavar="JSON", help="the annotations that have the ids of the images"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="FOLDER", help="draw each image with its predictions"
    )
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="FOLDER",
        help="segmentation: write a PNG of class ids for each image, with a palette",
    )
    parser.add_argument(
        "--top", type=int, metavar="K", help="the K best (default: the best class, all boxes)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="T",
        help=(
            "the lowest score to keep (default: of each class, as its evaluation chose; coco and "
            "one label per image: none)"
        ),
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args, flags = build_parser().parse_known_intermixed_args(argv)
    if args.top is not None and args.top < 1:
        raise Refused(f"--top {args.top}: must be at least 1")
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        raise Refused(f"--threshold {args.threshold}: must be between 0 and 1")
    if not args.images and not args.data:
        raise Refused(
            "no images are named: give files, folders, globs or @LIST after the model, or shards "
            "by --data"
        )
    if args.images and args.data:
        raise Refused(f"--data names shards, and {args.images[0]} is named, too; give one of them")
    # Takes seconds, as do other imports in functions, which --help need not.
    from tools.trained import load

    if args.data:
        flags += ["--data", args.data]
    trained = load(args.model, flags, takes_segmenters=True)
    if args.masks and not trained.is_segmenter:
        raise Refused(f"--masks {args.masks}: is for models of segmentation; leave it out")
    if args.images_of and Path(args.images_of).resolve() == Path(args.output).resolve():
        raise Refused(f"--output {args.output}: is the file of --images_of; name another")
    is_coco = args.format == "coco"
    has_ids = bool(args.images_of)
    if is_coco != has_ids or (has_ids and not trained.is_detector):
        raise Refused(
            "--format coco: for detectors, with --images_of JSON, whose ids it writes; others are "
            "jsonl or csv"
        )
    predict(args, trained, launch.start(trained.config))


def predict(args: argparse.Namespace, trained, accelerator) -> None:
    """Write the rows of the images that `words` name; a collective."""
    from common.detection.data.image_headers import read_header
    from common.distributed import all_or_none, broadcast_object, is_main
    from tools.predict.output import Output
    from tools.predict.plan import make_plan
    from tools.predict.rows import build_format

    with all_or_none("opening the output"):
        output = Output(args.output, args.overwrite) if is_main() else None
    with output or contextlib.nullcontext():
        shards = None
        if args.data:
            from common.shards import open_unlabelled

            needs_sizes = trained.is_detector or trained.is_segmenter
            shards = open_unlabelled(trained.config, read_header if needs_sizes else None)
        with all_or_none("listing the images"):
            plan = make_plan(args, trained, shards) if is_main() else None
        plan = broadcast_object(plan)
        log(launch.describe_launch(accelerator, trained.config.dtype))
        for note in plan.pop("notes"):
            log(note)
        form = build_format(args.format, trained.task, plan["image_ids"], plan["category_ids"])
        if output:
            output.start(form)
        write_rows(args, trained, accelerator, plan, shards, form, output)


def write_rows(
    args: argparse.Namespace, trained, accelerator, plan: dict, shards, form, output
) -> None:
    """Predict the images of `plan`, or of `shards`, and write the text of each; a collective.

    Only the main process has an `output`.
    """
    import torch
    from tqdm import tqdm

    from common.distributed import broadcast_object, gather_to_main

    source = _build_source(trained, plan, shards)
    builder = _create_builder(args, trained, plan, source)
    model, batches = trained.build(source, accelerator)
    # So that few rows wait for those before them.
    batches.loader.batch_sampler.sort(key=lambda indices: indices[0])
    predictions = iter(trained.predict(model, batches))
    num_broken = 0
    with (
        torch.compiler.set_stance("force_eager"),
        tqdm(total=len(source), unit=" images", disable=None if output else True) as bar,
    ):
        for _ in range(broadcast_object(len(batches))):  # the first rank has the most batches
            batch = next(predictions, None)
            rows: Iterable[tuple[int, dict]] = ()
            if batch:
                rows = builder.build(*batch)
            texts_by_rank = gather_to_main(make_texts(args, rows, source, form))
            for indices, texts, is_broken in texts_by_rank or ():
                for index, text in zip(indices.tolist(), texts, strict=True):
                    output.add(index, text)
                num_broken += int(is_broken.sum())
                bar.update(len(indices))
            if output:
                output.flush()
    errors = f", {num_broken:,} with an error" if num_broken else ""
    noun = "image" if len(source) == 1 else "images"
    log(f"{len(source):,} {noun}{errors}")


def _build_source(trained, plan: dict, shards) -> Any:
    """The images of `shards`, or those of `plan`, as the task of the model reads them."""
    import numpy as np

    from common.detection.data.annotated import build_empty_columns
    from tools.predict import images

    files = images.build_file_list(plan.pop("files")) if shards is None else shards
    if trained.is_detector:
        annotations = build_empty_columns(trained.classes, np.array(plan.pop("sizes")))
        return images.Scenes(**annotations, files=files)
    if trained.is_segmenter:
        return images.Unmasked(trained.classes, files, sizes=np.array(plan.pop("sizes")))
    return images.build_images(files, trained.classes, plan["multi_label"])


def _create_builder(args: argparse.Namespace, trained, plan: dict, source) -> Any:
    """What makes rows of predictions, as the task of the model has them."""
    import numpy as np

    from tools.predict.mask_rows import MaskRowBuilder
    from tools.predict.rows import RowBuilder

    is_multi_label = plan["multi_label"]
    top = args.top
    if top is None:
        top = 1 if trained.task == "classification" and not is_multi_label else 0
    if trained.is_segmenter:
        builder = MaskRowBuilder(source, top, masks=args.masks, overlays=args.draw)
        args.draw = None  # drawn with the rows, which do not hold the pixels
        return builder
    thresholds = np.array(plan["thresholds"], np.float32)
    return RowBuilder(source, thresholds, top, is_multi_label)


def make_texts(args: argparse.Namespace, rows: Iterable[tuple[int, dict]], source, form) -> tuple:
    """Make the texts of a batch: indices int64[B], texts [B], and bool[B], True for broken images.

    Draws the images that are not broken, too.
    """
    import numpy as np

    from tools.predict import pictures

    indices = []
    texts = []
    is_broken = []
    for index, row in rows:
        indices.append(index)
        # Bytes of a name that are no text.
        text = form.format_row(index, row)
        texts.append(text.encode(errors="backslashreplace"))
        is_broken.append("error" in row)
        if "error" in row and args.format == "coco":  # which has no place for it
            log(f"{row['file']}: {row['error']}", everywhere=True)
        if args.draw and "error" not in row:
            pictures.draw_predictions(args.draw, index, source, row)
    # With None, since numpy would turn texts alone into one array.
    return (
        np.array(indices, np.int64),
        np.array([*texts, None], object)[:-1],
        np.array(is_broken, bool),
    )


def log(text: str, everywhere: bool = False) -> None:
    """Print a line on stderr, on the main process or on each."""
    if everywhere or os.environ.get("RANK", "0") == "0":
        print(make_printable(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.argv[0] = "predict"  # as messages name it
    try:
        launch.run(hide_unset_flag()(main))
    except KeyboardInterrupt:
        sys.exit(130)
