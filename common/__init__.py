"""What recipes share, in rooms that import downward only; docs/design.md has a map of them."""

from common.process import ensure_home, guard_streams

guard_streams()
ensure_home()
