"""Publish: a model card from a run folder, and the best model with it on the Hugging Face hub."""
