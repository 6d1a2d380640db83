"""The command line of a tool: its module's docstring is what --help says, and a refusal is one line."""

import argparse
import sys
from collections.abc import Callable

from common.errors import Refused


def parser_of(tool: str, docstring: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m tools.<tool>`. The first paragraph of the docstring stands before the flags, the rest behind."""
    described, _, more = (docstring or "").partition("\n\n")
    return argparse.ArgumentParser(
        f"python -m tools.{tool}",
        description=described,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what a tool does not know may be a flag of the recipe
    )


def run(main: Callable[[], None]) -> None:
    """Call `main` of a tool that is one process; a refusal ends it with exit code 2. Others take `launch.run`."""
    try:
        main()
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
