"""The command line of a tool: its module's docstring is what --help says, and a refusal is one line."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from common.errors import Refused


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse in one line as a recipe does, also where a launcher started several processes."""
        from common.launching import launch  # takes seconds, which --help need not

        def refuse() -> None:
            raise Refused(f"{message}; --help lists what there is")

        sys.argv[0] = self.prog.rpartition(".")[2]  # begins the line
        launch.run(refuse)
        sys.exit(2)


def parser_of(tool: str, docstring: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m tools.<tool>`. The first paragraph of the docstring stands before the
    flags, the rest behind.
    """
    described, _, more = (docstring or "").partition("\n\n")
    return _Parser(
        f"python -m tools.{tool}",
        description=described,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what a tool does not know may be a flag of the recipe
    )


def run(main: Callable[[], None]) -> None:
    """Call `main` of a tool that is one process; a refusal ends it with exit code 2. Others take
    `launch.run`.
    """
    try:
        main()
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
