"""Compare runs: what differs between them, what each gave and cost, and whether the difference is
larger than noise.
"""
