"""The state of a training run, and how it outlives any fault."""
