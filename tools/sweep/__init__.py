"""Sweep: searches for the best flags of a recipe, in trials that are runs."""
