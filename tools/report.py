"""Write the page report.html of a run again, from the files of its folder.

    python -m tools.report runs/x

A run writes it when it ends. Of a run that was killed or copied from elsewhere, or was made by an
older version, this writes it later. No network, GPU or data are needed.
"""

from pathlib import Path

from tools.command_line import create_parser, refuse_unwritable, run


def main(argv: list[str] | None = None) -> None:
    parser = create_parser("report", __doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run folders")
    folders = parser.parse_args(argv).run
    from common.run.report import write  # takes a moment, which --help need not

    for folder in folders:
        with refuse_unwritable(str(folder)):
            print(write(folder))


if __name__ == "__main__":
    run(main)
