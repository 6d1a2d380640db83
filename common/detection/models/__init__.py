"""Detectors and their parts."""
