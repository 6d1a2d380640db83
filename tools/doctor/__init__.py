"""Doctor: whether a run will work on these machines, and how fast."""
