"""Compare runs: what differs between them, what each gave and cost, and whether the difference is
larger than noise.

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

from common.errors import Refused
from tools.command_line import create_parser, hide_unset_flag, refuse_unwritable


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
    words, flags = build_parser().parse_known_args(argv)
    from common.distributed import is_main
    from common.durable import make_folder
    from common.launching import launch
    from common.run import PastRun
    from common.run.folder import write_json
    from tools.compare import evaluation, tables

    if len(words.run) < 2:
        raise Refused(f"{words.run[0]}: name at least two runs to compare")
    if flags and words.recorded:
        raise Refused(f"--recorded evaluates nothing, so it has no use for {' '.join(flags)}")
    runs = [PastRun(path) for path in words.run]
    measured = []
    if not words.recorded:
        candidates = evaluation.find(words.run, flags)
        accelerator = launch.start(candidates[0].trained.config)
        measured = [
            (candidate, evaluation.measure(candidate, accelerator)) for candidate in candidates
        ]
    if not is_main():
        return
    lines = tables.describe(runs)
    found: dict = {"runs": [tables.facts(run) for run in runs]}
    if measured:
        more, found["differences"] = _differences(measured)
        lines += more
    if words.output:
        with refuse_unwritable(f"--output {words.output}"):
            make_folder(words.output)
            write_json(words.output / "comparison.json", found)
        lines += ["", f"written: {words.output / 'comparison.json'}"]
    for line in lines:
        launch.print_on_main(line)


def _differences(measured: Sequence[tuple]) -> tuple[list[str], list[dict]]:
    """Each (candidate, measure) against the first: text, and the same for comparison.json."""
    from common.run.progress import display_name
    from common.run.report import format_result
    from tools.compare import bootstrap

    (first, of_first), found = measured[0], []
    lines = ["", f"is it more than noise? {display_name(first.metric)} on {first.part}"]
    for other, of_other in measured[1:]:
        of = bootstrap.compare(of_first, of_other, len(first.val))
        verdict = "larger than noise" if of.is_larger_than_noise else "no difference beyond noise"
        difference, low, high = (
            f"{100 * value:+.2f} points" for value in (of.value, of.low, of.high)
        )
        lines += [
            f"  {first.path} {format_result(of.first)}, {other.path} {format_result(of.second)}: {verdict}",
            f"    difference {difference}, 95 % interval {low} to {high}; 0 or of the other sign "
            f"in {of.sign_changes:.1%} of {of.resamples:,} resamples",
        ]
        found.append(
            {
                "metric": first.metric,
                "first": str(first.path),
                "second": str(other.path),
                "results": [of.first, of.second],
                "difference": of.value,
                "interval": [of.low, of.high],
                "sign_changes": of.sign_changes,
                "resamples": of.resamples,
                "larger_than_noise": of.is_larger_than_noise,
            }
        )
    noise = (
        "  Noise comes from the choice of validation images. How much another --seed changes, "
        "only more runs tell."
    )
    return [*lines, noise], found


if __name__ == "__main__":
    sys.argv[0] = "tools.compare"  # what messages begin with
    from common.launching import launch

    launch.run(hide_unset_flag()(main))
