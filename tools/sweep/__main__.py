"""Search for the best flags of a recipe with Optuna: offline, resumable, and from the file that `wandb sweep` takes.

    python -m tools.sweep recipes/presets/sweep_cls.yaml --trials 20

Each trial is a run of its own, started by the file's command. A trial that is worse than the median of those before it, at the
same step, is stopped. Kill the sweep at any moment: the same command continues it, the unfinished trial from its checkpoint.
Flags of the recipe may follow, such as --data FOLDER --epochs 5; they hold for every trial.
"""

import argparse
import signal
import sys
from pathlib import Path

from common.distributed.exit_codes import RESUMABLE
from common.errors import Again, Refused
from tools.command_line import parser_of


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of("sweep", __doc__)
    parser.add_argument(
        "file", type=Path, help="YAML file of `wandb sweep`: program, method, metric, parameters, command"
    )
    parser.add_argument("--trials", type=int, default=20, help="trials in all, over every start (default: 20)")
    parser.add_argument("--config_file", help="launch with this Accelerate config instead of the file's")
    parser.add_argument("--study", type=Path, help="the study's SQLite file (default: OUTPUT_DIR/NAME OF FILE.db)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="where run folders go (default: runs)")
    parser.add_argument("--sweep_seed", type=int, default=0, help="decides which values are tried (default: 0)")
    parser.add_argument(
        "--unpruned", type=int, default=5, help="completed trials before one may be stopped (default: 5)"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    words, flags = arguments().parse_known_args(argv)
    from tools.sweep.study import Sweep  # takes a second, which --help need not

    sweep = Sweep(words, flags)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweep.run()
    except KeyboardInterrupt:
        sweep.leave()
        raise Again("the sweep was stopped: the same command continues it") from None


if __name__ == "__main__":
    try:
        main()
    except (Refused, Again) as error:
        print(error, file=sys.stderr)
        sys.exit(RESUMABLE if isinstance(error, Again) else 2)
