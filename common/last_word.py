"""What does a process leave for its launcher to read, so that an end on purpose is not taken for a crash?"""

import os
from pathlib import Path

LAST_WORD = "RECIPES_LAST_WORD"  # names the file; set by the launcher, see rendezvous


def leave_word(code: int) -> None:
    """Tell the launcher of this process that it ends with `code` on purpose, and is not to be restarted."""
    if path := os.environ.get(LAST_WORD):
        Path(path).write_text(str(code))
