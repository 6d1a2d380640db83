"""Weights that a detector begins with: reading files, and loading them class by class."""
