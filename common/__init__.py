"""What the recipes share: every module answers the one question its first line asks."""
