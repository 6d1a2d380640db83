"""Horovod's parts that are common to its frameworks: exceptions and process sets."""
