"""Audit: training labels and boxes that a trained model contradicts."""
