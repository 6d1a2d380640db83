"""A run: its folder, records, checkpoints, reports and end."""
