"""Tools: what comes before and after training."""
