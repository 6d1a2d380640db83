"""Adopt the configuration of another training tool: writes a preset, and says what became of every setting.

    python -m tools.adopt output/train/run/args.yaml --gpus 8

Reads what runs of other tools leave: timm's args.yaml, and the config in MMDetection's work_dir. Nothing in these files is
executed.
"""

import argparse
from pathlib import Path

from tools.command_line import parser_of, run


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of("adopt", __doc__)
    parser.add_argument("file", type=Path, help="args.yaml of timm, or a config of MMDetection")
    parser.add_argument("-o", "--output", type=Path, help="the preset (default: FILE's name, here)")
    parser.add_argument("--overwrite", action="store_true", help="replace the preset if it exists")
    of_run = "GPUs of the original run, where its batch size is per GPU"
    parser.add_argument("--gpus", type=int, default=0, help=of_run)
    parser.add_argument("--images", type=int, default=0, help="training images, where lengths are given in iterations")
    return parser


def main(argv: list[str] | None = None) -> None:
    words = arguments().parse_args(argv)
    from tools.adopt.readers import read  # takes seconds, which --help need not

    adoption = read(words.file, words.gpus, words.images)
    output = words.output or Path(f"{words.file.stem}.yaml")
    command = adoption.write(output, words.overwrite)
    print(f"{words.file} of {adoption.tool} -> {output}\n{adoption.table()}\n\n{command}")


if __name__ == "__main__":
    run(main)
