"""Replay: shows what a step of a run saw. See `__main__.py`."""
