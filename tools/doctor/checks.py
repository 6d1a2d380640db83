"""Checks: the list of all checks, in the order in which they run."""

from tools.doctor import bandwidth, clock, gpus, interfaces, limits, meeting, speed, tracker, versions
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
    Check("speed", speed.speed, "group"),
    Check("network: bandwidth", bandwidth.bandwidth, "group", limit=25.0),
]
