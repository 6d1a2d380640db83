"""Does a GPU take the fastest kernels, or those that repeat a run bit for bit?"""

import os
import re

import torch

from common.errors import Refused

_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def choose(deterministic: bool, fixed_shapes: bool) -> None:
    """Choose the kernels of this process; before anything is on its device.

    With `fixed_shapes`, where convolutions meet few shapes, cuDNN tries its algorithms once for each of them and keeps the
    fastest: another one at each start, perhaps.
    """
    torch.backends.cudnn.benchmark = fixed_shapes and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each tensor, to find faults with
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # --compile: no choice by measured time


def check(error: Exception) -> None:
    """Raise `Refused` if `error` says that an operator has no deterministic kernel."""
    if found := _NO_KERNEL.search(str(error)):
        raise Refused(
            f"--deterministic: torch has no deterministic kernel of {found[1]} for this device: leave the flag out, or "
            "change what uses it"
        ) from error
