"""Devices: whatever depends on their kind. No other module calls torch.cuda, torch.mps or torch.xpu.

torch.accelerator, torch.Stream and torch.Event work for every kind. Only CUDA has been tried.
"""

from typing import Any

import torch


def get_device_type() -> str:
    """The type of this machine's accelerator, such as "cuda", which a run need not use.

    "cpu" if it shows none.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def has_streams(device: torch.device | str | None = None) -> bool:
    """True if the host works ahead of the device (default: this machine's accelerator).

    It does not for CPUs and Apple's GPUs.
    """
    device_type = torch.device(device).type if device else get_device_type()
    return device_type not in ("cpu", "mps")


def record_event() -> torch.Event | None:
    """An event that has passed once the device has done all of its work so far; None without streams."""
    if not has_streams():
        return None
    event = torch.Event()
    event.record()
    return event


def get_sum_dtype(device: torch.device | str) -> torch.dtype:
    """The type for sums: float64, except on Apple's GPUs, which lack it."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def seed_generator(key: int, device: torch.device) -> None:
    """Seed the generator of this process's `device`, which a model's dropout draws from."""
    key &= 0x7FFFFFFFFFFFFFFF
    if device.type == "cpu":
        torch.default_generator.manual_seed(key)
    else:
        _get_module(device).manual_seed(key)


def get_rng_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that `seed_generator` seeds."""
    module = _get_module(device)
    if hasattr(module, "get_rng_state"):
        return module.get_rng_state()
    return torch.get_rng_state()


def get_device_name(device: torch.device) -> str:
    """The name of a GPU: "NVIDIA H100 80GB HBM3"; its type if such devices have no names."""
    module = _get_module(device)
    if hasattr(module, "get_device_name"):
        return module.get_device_name(device)
    return device.type


def get_device_properties(device: torch.device) -> Any:
    """Of a device with streams: `name`, `total_memory`, and usually `uuid`."""
    return _get_module(device).get_device_properties(device)


def get_memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """Free and total bytes of a device with streams."""
    return _get_module(device).mem_get_info(device)


def get_nccl_version() -> tuple[int, ...]:
    """The version of torch's NCCL: (2, 27, 3); () if it has none."""
    if not torch.distributed.is_nccl_available():
        return ()
    return torch.cuda.nccl.version()


def _get_module(device: torch.device | None) -> Any:
    return torch.get_device_module(device or get_device_type())
