"""What the recipes share, in rooms that import downward only: docs/design.md has the map."""
