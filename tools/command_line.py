"""The command line of a tool: its module's docstring is what --help says."""

import argparse


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
