"""Choice of GPU kernels: the fastest ones, or deterministic ones that repeat a run bit for bit."""

import os
import re

import torch

from common.errors import Refused


def set_deterministic(deterministic: bool) -> None:
    """Choose the kernels of this process. Must be called before anything is on its device."""
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
    # It would launch a kernel per tensor, only for debugging.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # --compile: don't choose by measured times.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def set_benchmark(has_few_shapes: bool) -> None:
    """For few different shapes, let cuDNN try its algorithms and keep the fastest.

    That may be another one at each start.
    """
    torch.backends.cudnn.benchmark = has_few_shapes
    if torch.are_deterministic_algorithms_enabled():
        torch.backends.cudnn.benchmark = False


def refuse_missing_kernel(error: Exception) -> None:
    """Raise `Refused` if `error` says that an operator has no deterministic kernel."""
    match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if match:
        raise Refused(
            f"--deterministic: torch has no deterministic kernel of {match[1]} for this device: "
            "leave the flag out, or change what uses it"
        ) from error
