"""Doctor: says in under a minute whether a run will work on these machines, and how fast.

    accelerate launch --config_file accelerate_configs/2node.yaml --main_process_ip HOST -m tools.doctor
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m tools.doctor \
        recipes/cls.py --data FOLDER
    python -m tools.doctor --only rehearsal --json found.json

It shows one table: what was measured, and for each trouble the cause and the way out. Checks of a
model and its data take the recipe and its flags, which stand last. The exit code is 0 if nothing
failed, 1 if something did.
"""

import argparse
import sys
from pathlib import Path

from tools.command_line import create_parser


def build_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = create_parser("doctor", __doc__)
    parser.add_argument(
        "--only",
        metavar="WORDS",
        help="run only these checks: first words of rows, joined by commas",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the findings and their figures as JSON"
    )
    parser.add_argument(
        "--wait", type=float, default=30, metavar="SECONDS", help="for all processes (30)"
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="recipes/cls.py; its flags follow")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run all checks on every rank; rank 0 prints the table."""
    options = build_parser().parse_args()
    sys.argv[0] = "doctor"  # as messages name it

    from common.launching import launch  # torch, after --help
    from tools.doctor.session import examine

    launch.run(lambda: sys.exit(examine(options)))


if __name__ == "__main__":
    main()
