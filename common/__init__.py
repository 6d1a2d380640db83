"""What recipes share, in rooms that import downward only; docs/design.md has a map of them."""
