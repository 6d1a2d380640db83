"""Replay a step of a run: shows the very pictures that it saw, with their labels and losses.

    python -m tools.replay runs/digits --step 1234
    python -m tools.replay runs/digits --step 1234 -o suspicious_step

Works from the run folder alone and changes nothing in it. The recipe, or the one that --recipe FILE
names, resumes a checkpoint from before the step in a temporary folder, and makes the steps up to it
again. Writes sheet.png (pictures as the network saw them, largest losses first), samples.jsonl
(every sample) and step.json (metrics of the step, replayed and logged). Flags that are not listed
here are the recipe's: --workers 0, or --data FOLDER if the data have moved.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tools.command_line import create_parser, hide_unset_flag


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("replay", __doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--step", type=int, required=True, help="as in metrics.jsonl; the first is 1"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="new folder to write (default: replay-RUN-STEP, here)"
    )
    parser.add_argument(
        "--from_start", action="store_true", help="make all steps again, without a checkpoint"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args, flags = build_parser().parse_known_args(argv)
    from common.launching import run_main
    from tools.replay.replay import replay  # takes seconds, which --help need not

    sys.argv[0] = str(Path(__file__).parent)  # its name begins messages
    output = args.output or Path(f"replay-{args.run.resolve().name}-{args.step}")
    main_function = partial(replay, args.run, args.step, output, flags, args.from_start)
    run_main(hide_unset_flag()(main_function))


if __name__ == "__main__":
    main()
