"""Compare runs: what differs, what each gave and cost, and whether it is more than noise."""
