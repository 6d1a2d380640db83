"""Adopt: turns the configuration of another training tool into a preset, and says what became of every setting."""
