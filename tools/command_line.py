"""The command line of a tool: its module's docstring is what --help says, and a refusal is one line."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from common.errors import Refused, get_os_reason


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse in one line as a recipe does, also where a launcher started several processes."""
        from common.launching import launch  # takes seconds, which --help need not

        def refuse() -> None:
            raise Refused(f"{message}; --help lists what there is")

        sys.argv[0] = self.prog.rpartition(".")[2]  # begins the line
        launch.run(refuse)
        sys.exit(2)


def create_parser(tool: str, docstring: str | None) -> argparse.ArgumentParser:
    """Create the parser of `python -m tools.<tool>`.

    In --help, the first paragraph of the docstring stands before the flags, the rest behind them.
    """
    description, _, epilog = (docstring or "").partition("\n\n")
    return _Parser(
        f"python -m tools.{tool}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what a tool does not know may be a flag of the recipe
    )


@contextlib.contextmanager
def refuse_unwritable(target: str) -> Iterator[None]:
    """Refuse in one line if `target`, such as "--output FOLDER", can't be written."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"{target}: can't be written ({get_os_reason(error)}); name another",
        ) from error


@contextlib.contextmanager
def hide_unset_flag() -> Iterator[None]:
    """Let a refusal begin with a value alone if the tool or the run, not the user, has set its flag."""
    try:
        yield
    except Refused as error:
        flag, _, text = str(error).partition(" ")
        if flag.startswith("--") and not any(word.startswith(flag) for word in sys.argv):
            raise Refused(text) from error
        raise


def run(main: Callable[[], None]) -> None:
    """Call `main` of a tool that is one process; a refusal ends it with exit code 2.

    Tools of several processes take `launch.run`.
    """
    try:
        with hide_unset_flag():
            main()
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
