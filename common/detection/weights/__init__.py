"""Weights that a detector begins with: reading files of several origins, and loading them class by class."""
