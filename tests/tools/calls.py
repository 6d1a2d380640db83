"""Calls of tools in the process of the test."""

from collections.abc import Callable, Sequence


def call_tool(main: Callable[[list[str]], object], argv: Sequence[object]) -> None:
    """Call a tool's `main` with these arguments, as texts."""
    main(list(map(str, argv)))
