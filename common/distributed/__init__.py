"""Processes and machines: how they start, meet, talk and end."""
