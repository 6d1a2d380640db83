"""Compare runs: what differs between them, what each gave and cost, and whether the difference is larger than noise.

    python -m tools.compare runs/a runs/b -o comparison

Each run is compared with the first. Their best models are evaluated on the same validation images, which must be the same for
all, and the images are resampled (paired bootstrap). FOLDER gets comparison.json. Flags that are not listed are the recipe's,
for all models: --data FOLDER, --workers 4. On several devices: accelerate launch --config_file
accelerate_configs/multi_gpu.yaml -m tools.compare runs/a runs/b
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import Refused
from tools.command_line import parser_of


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of("compare", __doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run folders; the others are compared with the first")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write the results to this folder")
    parser.add_argument("--resamples", type=int, default=1_000, help="of the validation images (default: 1,000)")
    parser.add_argument("--recorded", action="store_true", help="only what the folders record, without an evaluation")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    words, flags = arguments().parse_known_args(argv)
    from common.distributed import is_main
    from common.durable import make_folder
    from common.launching import launch
    from common.run import PastRun
    from common.run.folder import write_json
    from tools.compare import evaluation, tables

    if len(words.run) < 2:
        raise Refused(f"{words.run[0]}: name at least two runs to compare")
    if words.resamples < 100:
        raise Refused(f"--resamples {words.resamples}: at least 100, else the interval is mostly chance")
    if flags and words.recorded:
        raise Refused(f"--recorded evaluates nothing, so it has no use for {' '.join(flags)}")
    runs = [PastRun(_run_of(path)) for path in words.run]
    _refuse_other_data(runs, flags)
    predictions = []
    if not words.recorded:
        candidates = evaluation.find([run.path for run in runs], flags)
        accelerator = launch.start(candidates[0].trained.config)
        predictions = [evaluation.measure(candidate, accelerator) for candidate in candidates]
    if not is_main():
        return
    lines = _describe(runs)
    found: dict = {"runs": [tables.facts(run) for run in runs]}
    if not words.recorded:
        more, found["differences"] = _differences(predictions, words.resamples)
        lines += more
    if words.output:
        try:
            make_folder(words.output)
            write_json(words.output / "comparison.json", found)
        except OSError as error:
            raise Refused(
                f"--output {words.output} can't be written ({error.strerror}): name another folder"
            ) from error
        lines += ["", f"written: {words.output / 'comparison.json'}"]
    for line in lines:
        launch.say(line)


def _run_of(path: Path) -> Path:
    """The run folder; it may be named by its best/."""
    return path.parent if path.name == "best" and (path / "run.json").is_file() else path


def _refuse_other_data(runs: Sequence, flags: Sequence[str]) -> None:
    """Before anything is read: refuse runs that record other validation data, unless flags name the data for all."""
    parts = [run.fingerprint.partition("-")[2] for run in runs]
    for run, part in zip(runs, parts, strict=True):
        if "--data" not in flags and part and parts[0] and part != parts[0]:
            theirs = [one.starts[-1].get("data", "") if one.starts else "" for one in (runs[0], run)]
            raise Refused(
                f"{runs[0].path} and {run.path}: were evaluated on different images or labels ({parts[0]} of {theirs[0]}; "
                f"{part} of {theirs[1]}), so their results can't be compared: name the same for all, by --data FOLDER"
            )


def _describe(runs: Sequence) -> list[str]:
    """Tables of what the folders record."""
    from tools.compare import tables

    names = [run.name if len({one.name for one in runs}) == len(runs) else str(run.path) for run in runs]
    lines = ["configuration: what differs"]
    lines += tables.layout(names, tables.configuration(runs), "nothing")
    for run, name in zip(runs[1:], names[1:], strict=True):
        changed = tables.source_difference(runs[0], run)
        what = "not recorded by both" if changed is None else "" if changed else "the same"
        lines += ["", f"recipe source, {names[0]} and {name}: {what}".rstrip()]
        lines += [f"  {line}" for line in changed or ()]
    known = [run.fingerprint for run in runs]
    if len({*known}) == 1 and all(known):
        lines += ["", "data fingerprint: the same"]
    elif all(known):
        parts = zip(*(fingerprint.partition("-")[::2] for fingerprint in known), strict=True)
        rows = [*zip(("training", "validation"), map(list, parts), strict=True)]
        lines += ["", "data fingerprint: differs in", *tables.layout(names, rows)]
    else:
        lines += ["", "data fingerprint: not recorded by all"]
    lines += ["", "results of the best models", *tables.layout(names, tables.results(runs))]
    lines += ["", "cost", *tables.layout(names, tables.cost(runs))]
    head = [*names, "change"] if len(runs) == 2 else names
    lines += ["", "classes that changed most"]
    return lines + tables.layout(head, tables.classes(runs), "none")


def _differences(predictions: Sequence, resamples: int) -> tuple[list[str], list[dict]]:
    """Each model against the first: text, and the same for comparison.json."""
    from common.run.progress import display_name
    from common.run.report import in_words
    from tools.compare import bootstrap
    from tools.compare.tables import points

    first, found = predictions[0], []
    name, images = display_name(first.metric), len(first.candidate.val)
    lines = ["", f"is it more than noise? {name} on {first.candidate.part}"]
    for other in predictions[1:]:
        of = bootstrap.compare(first.result, other.result, images, resamples)
        verdict = "larger than noise" if of.is_larger_than_noise else "no difference beyond noise"
        lines += [
            f"  {first.candidate.path} {in_words(of.first)}, {other.candidate.path} {in_words(of.second)}: {verdict}",
            f"    difference {points(of.value)}, 95 % interval {points(of.low)} to {points(of.high)}; 0 or of the other sign "
            f"in {of.sign_changes:.1%} of {of.resamples:,} resamples",
        ]
        entry = {"metric": first.metric, "first": str(first.candidate.path), "second": str(other.candidate.path)}
        entry |= {"results": [of.first, of.second], "difference": of.value, "interval": [of.low, of.high]}
        entry |= {
            "sign_changes": of.sign_changes,
            "resamples": of.resamples,
            "larger_than_noise": of.is_larger_than_noise,
        }
        found.append(entry)
    noise = "  Noise comes from the choice of validation images. How much another --seed changes, only more runs tell."
    return [*lines, noise], found


if __name__ == "__main__":
    sys.argv[0] = "tools.compare"  # what messages begin with
    from common.launching import launch

    launch.run(main)
