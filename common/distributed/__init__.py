"""What trained code calls: collectives, agreement between processes, the watchdog, deterministic kernels."""
