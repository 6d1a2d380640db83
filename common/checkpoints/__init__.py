"""Checkpoints: state of a training run, saved durably and resumed."""
