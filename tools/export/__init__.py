"""Export: writes a trained model for a runtime, and proves that it is the same model."""
