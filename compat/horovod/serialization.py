"""Objects as bytes, for other ranks and for files, read back without running anybody's code.

Horovod pickles objects with cloudpickle, and whoever reaches a port of such a job can run code in
it. Here the reader is torch's restricted unpickler (`torch.load(weights_only=True)`), which builds
only the types that it knows: plain values, containers, tensors, numpy arrays, argparse.Namespace,
paths and the types of datetime. Other classes are accepted once every rank has called
`torch.serialization.add_safe_globals([TheClass])`.
"""

import argparse
import datetime
import io
import pathlib
import re
import types
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray  # type: ignore[attr-defined] # what pickled arrays name

_ARRAY_KINDS = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 "
    "complex128 str bytes"
)
_SAFE: list[Any] = [int, float, bool, str, bytes, list, tuple, dict, frozenset, range, slice]
_SAFE += [argparse.Namespace, types.SimpleNamespace]
_SAFE += [datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone]
_SAFE += [pathlib.PosixPath, pathlib.PurePosixPath]
_SAFE += [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar]
_SAFE += {type(np.dtype(kind)) for kind in _ARRAY_KINDS.split()}


def dumps(item: Any, what: str) -> bytes:
    """The object as bytes that `loads` reads.

    Raises:
        TypeError: if the object holds a class that `loads` does not build. `what` names it
            for people.
    """
    buffer = io.BytesIO()
    try:
        torch.save(item, buffer)
        loads(buffer.getvalue())
    except Exception as error:
        # Pickle raises many kinds: PicklingError, AttributeError, TypeError, UnpicklingError.
        text = " ".join(str(error).split())[:200]
        match = re.search(r"Unsupported (?:class|global): GLOBAL (\S+)", str(error))
        if match:
            text = match[1]
        raise TypeError(
            f"{what} holds {text}, which is no plain value, container, array or tensor: convert "
            "it, or call torch.serialization.add_safe_globals([ItsClass]) on every rank"
        ) from error
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The object of `dumps`. Tensors of a GPU arrive on this process's current GPU."""
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(io.BytesIO(data), map_location=_move_to_current_gpu, weights_only=True)


def _move_to_current_gpu(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage
