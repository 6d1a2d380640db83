"""What tests of tools change in the files of a run."""

import json
from pathlib import Path


def update_json(file: Path, **changes: object) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
