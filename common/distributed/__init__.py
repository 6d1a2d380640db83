"""Processes and machines of a run: launch, rendezvous, collectives, watchdog, exit codes."""
