"""Checks: the list of all checks, in the order in which they run."""

from tools.doctor import meeting, plan
from tools.doctor.examination import Check

CHECKS = [
    Check("launch", meeting.launch, once_per_machine=True),
]

# What --plan runs instead.
PLAN = [
    Check("launch", meeting.launch, once_per_machine=True),
    Check("plan", plan.predict, needs="store", limit=plan.LIMIT_S),
]
