"""Checks: the list of all checks, in the order in which they run."""

from tools.doctor import meeting
from tools.doctor.examination import Check

CHECKS = [
    Check("launch", meeting.launch, once_per_machine=True),
]
