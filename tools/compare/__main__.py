"""Compare runs: what differs, what each gave and cost, and whether it is more than noise.

    python -m tools.compare runs/a runs/b -o comparison

Each run is compared with the first. Their best models are evaluated on the same validation images,
which must be the same for all, and the images are resampled (paired bootstrap). FOLDER gets
comparison.json. Flags that are not listed are the recipe's, for all models: --data FOLDER,
--workers 4. A run of your own copy needs --recipe mine.py. On several devices: accelerate launch
--config_file accelerate_configs/multi_gpu.yaml -m tools.compare runs/a runs/b
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import Refused
from tools.command_line import create_parser, hide_unset_flag, refuse_unwritable

if TYPE_CHECKING:
    from tools.compare.evaluation import Candidate


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("compare", __doc__)
    parser.add_argument(
        "run", nargs="+", type=Path, help="run folders; the others are compared with the first"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="write the results to this folder"
    )
    parser.add_argument(
        "--recorded",
        action="store_true",
        help="only what the folders record, without an evaluation",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args, flags = build_parser().parse_known_args(argv)
    from common.distributed import is_main
    from common.durable import make_folder
    from common.launching import launch
    from common.run import PastRun
    from common.run.folder import write_json
    from tools.compare import evaluation, tables

    if len(args.run) < 2:
        raise Refused(f"{args.run[0]}: name at least two runs to compare")
    if flags and args.recorded:
        raise Refused(f"--recorded evaluates nothing, so it has no use for {' '.join(flags)}")
    runs = [PastRun(path) for path in args.run]
    candidates = []
    measures = []
    if not args.recorded:
        candidates = evaluation.load_candidates(args.run, flags)
        accelerator = launch.start(candidates[0].trained.config)
        measures = [evaluation.evaluate(candidate, accelerator) for candidate in candidates]
    if not is_main():
        return
    lines = tables.describe_runs(runs)
    content: dict = {"runs": [tables.collect_facts(run) for run in runs]}
    if candidates:
        differences = compare_results(candidates, measures)
        lines += describe_differences(candidates, differences)
        content["differences"] = differences
    if args.output:
        with refuse_unwritable(f"--output {args.output}"):
            make_folder(args.output)
            write_json(args.output / "comparison.json", content)
        lines += ["", f"written: {args.output / 'comparison.json'}"]
    for line in lines:
        launch.print_on_main(line)


def compare_results(candidates: Sequence["Candidate"], measures: Sequence) -> list[dict]:
    """Compare each model with the first, for comparison.json."""
    from tools.compare import bootstrap

    first = candidates[0]
    differences = []
    for candidate, measure in zip(candidates[1:], measures[1:], strict=True):
        difference = bootstrap.compare(measures[0], measure, len(first.val))
        differences.append(
            {
                "metric": first.metric,
                "first": str(first.path),
                "second": str(candidate.path),
                "results": [difference.first, difference.second],
                "difference": difference.value,
                "interval": [difference.low, difference.high],
                "sign_changes": difference.sign_changes,
                "resamples": difference.resamples,
                "larger_than_noise": difference.is_larger_than_noise,
            }
        )
    return differences


def describe_differences(
    candidates: Sequence["Candidate"], differences: Sequence[dict]
) -> list[str]:
    """Lines about the differences of `compare_results`."""
    from common.run.progress import display_name
    from common.run.report import format_result

    first = candidates[0]
    lines = ["", f"is it more than noise? {display_name(first.metric)} on {first.split}"]
    for row in differences:
        verdict = "no difference beyond noise"
        if row["larger_than_noise"]:
            verdict = "larger than noise"
        first_result, second_result = (format_result(value) for value in row["results"])
        low, high = (_format_points(value) for value in row["interval"])
        lines += [
            f"  {row['first']} {first_result}, {row['second']} {second_result}: {verdict}",
            f"    difference {_format_points(row['difference'])}, 95 % interval {low} to {high}; "
            f"0 or of the other sign in {row['sign_changes']:.1%} of {row['resamples']:,} "
            "resamples",
        ]
    lines.append(
        "  Noise comes from the choice of validation images. How much another --seed changes, "
        "only more runs tell."
    )
    return lines


def _format_points(value: float) -> str:
    return f"{100 * value:+.2f} points"


if __name__ == "__main__":
    sys.argv[0] = "tools.compare"  # what messages begin with
    from common.launching import launch

    launch.run(hide_unset_flag()(main))
