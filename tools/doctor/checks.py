"""Checks: the list of all checks, in the order in which they run."""

from tools.doctor import (
    bandwidth,
    clock,
    data,
    gpus,
    interfaces,
    limits,
    meeting,
    plan,
    rehearsal,
    speed,
    tracker,
    versions,
)
from tools.doctor.examination import Check

CHECKS = [
    Check("launch", meeting.launch),
    Check("limits", limits.limits, once_per_machine=True),
    Check("gpu", gpus.gpus, limit=25.0),
    Check("network: interfaces", interfaces.interfaces, once_per_machine=True),
    Check("network: host name", interfaces.host_name, once_per_machine=True),
    Check("W&B", tracker.tracker),
    Check("versions", versions.versions, "store"),
    Check("gpu: kinds", gpus.same_gpus, "store"),
    Check("network: MTU", interfaces.same_mtu, "store"),
    Check("clock", clock.clock, "store", limit=30.0),
    Check("network: ports", interfaces.ports, "store"),
    Check("data", data.folders, "store", limit=data.LIMIT_S),
    Check("rehearsal", rehearsal.rehearse, "store", limit=rehearsal.LIMIT_S),
    Check("speed", speed.speed, "group"),
    Check("network: bandwidth", bandwidth.bandwidth, "group", limit=25.0),
]

# What --plan runs instead.
PLAN = [
    Check("launch", meeting.launch),
    Check("plan", plan.predict, "store", limit=plan.LIMIT_S),
]
