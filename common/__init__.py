"""What recipes share, in rooms that import downward only; docs/design.md has a map of them."""

import os
import sys
from pathlib import Path

from common.process import ensure_home, guard_streams


def _refuse_old_copy() -> None:
    """End the process if it runs a copy of a recipe from before 0.2.0, whose imports would fail one after the other."""
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if file.endswith(".py") and "Run(config, accelerator)" in Path(file).read_text(errors="replace"):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"{Path(file).name}: is a copy of a recipe from before version 0.2.0: make the same changes in a new copy, "
                "or see the table in docs/change_it.md#copies-from-before-020",
                file=sys.stderr,
            )
        from common.launching.exit_codes import announce_exit

        announce_exit(2)  # else the launcher would print a traceback of its own
        sys.exit(2)


guard_streams()
ensure_home()
_refuse_old_copy()
