"""What tests of tools change in the files of a run."""

import json
from pathlib import Path


def update_json(file: Path, **changes: object) -> dict:
    """Set keys of a JSON file; the content it had."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))
    return content
