"""A run: its folder, progress, step reports, log, tracker, plots and shutdown."""
