"""nvidia-smi: what it says about this machine's GPUs, as rows of text."""

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

PATIENCE_S = 8.0  # a healthy nvidia-smi takes 0.1 to 2 s; one that hangs is a sign of a lost GPU


def query(fields: Sequence[str], what: str = "gpu") -> list[dict[str, str]]:
    """`nvidia-smi --query-<what>=<fields>`: a dict per row. Empty if there is no nvidia-smi, or it refuses the fields.

    Raises TimeoutError if it does not answer.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"nvidia-smi does not answer within {PATIENCE_S:.0f} s: a GPU may be lost, see dmesg"
        ) from None
    if done.returncode:
        return []
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def number(text: str) -> float | None:
    """A figure of nvidia-smi; None for "[N/A]" and its like."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None
