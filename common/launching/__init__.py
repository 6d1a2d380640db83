"""Starting and finding processes: launchers, meeting, rendezvous, exit codes, and the checks before a run."""
