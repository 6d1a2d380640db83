"""What comes of asking for a range of bytes of a shard."""

from common.data.shard_names import printable_name
from common.errors import Refused

Answer = tuple[bytes, int, str]  # bytes of a range, and of its file the size and tag


class Unreadable(Refused):
    """A range that can't be read. Its text is one line that names shard, offset and cause, and holds no secret."""

    def __init__(self, name: str, start: int | None = None, cause: str = ""):
        # With one argument it is the finished text, as when a data worker's error is raised again in the training process.
        super().__init__(name if start is None else f"{printable_name(name)}: byte {start:,}: {cause}")


class ShardChanged(Unreadable):
    """A shard that is not the one that was indexed."""

    def __init__(self, name: str, start: int | None = None, now: str = "", before: str = ""):
        super().__init__(name, start, f"it has changed since it was indexed: it is {now} now, and was {before}")


class Fault(Exception):
    """A fault that may pass: the range is asked for again."""

    def __init__(self, cause: str, wait: float = 0.0):
        """`cause` holds no secret; `wait`: seconds that the server asks to wait."""
        super().__init__(cause)
        self.cause, self.wait = cause, wait
