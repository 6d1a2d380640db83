"""Formats of exported models: what each needs, and how a module is written in it."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import Refused

_OPSET = 18  # of ONNX
MOST_PIXELS = 2**16  # of a side of a picture


@dataclass(frozen=True)
class Format:
    """A file format and the packages that write and run it."""

    file: str  # the model's name in its folder
    # By the names under which pip installs them, which are those that Python imports.
    packages: tuple[str, ...]
    # The program, its outputs, the file.
    write: Callable[[torch.export.ExportedProgram, Sequence[str], Path], None]

    def check(self, name: str) -> None:
        """Raise `Refused` if a package is missing."""
        if missing := [
            package for package in self.packages if importlib.util.find_spec(package) is None
        ]:
            raise Refused(
                f"--to {name}: needs {', '.join(missing)}: pip install {' '.join(missing)}"
            )


def write(
    name: str, module: torch.nn.Module, batched: bool, outputs: Sequence[str], folder: Path
) -> None:
    """Write the module in the format `name` into `folder`. Raises `Refused` if torch or the format
    can't express it.

    The module takes one picture, or any number if it is `batched`.
    """
    wanted = FORMATS[name]
    shapes = {
        axis: torch.export.Dim(side, min=1, max=MOST_PIXELS)
        for axis, side in ((2, "height"), (3, "width"))
    }
    if batched:
        shapes[0] = torch.export.Dim("batch", min=1)
    example = torch.zeros(1 + batched, 3, 96, 160, dtype=torch.uint8)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of exporters, about their own code
            program = torch.export.export(module.eval(), (example,), dynamic_shapes=(shapes,))
            wanted.write(program, outputs, folder / wanted.file)
    except Exception as error:  # exporters raise almost anything
        reason = next(iter(str(error).strip().splitlines()), "")
        raise Refused(
            f"--to {name}: the model can't be written ({type(error).__name__}: {reason:.300}); "
            "try another format"
        ) from error


def _torch_export(program: torch.export.ExportedProgram, _: Sequence[str], file: Path) -> None:
    torch.export.save(program, file)


def _onnx(program: torch.export.ExportedProgram, outputs: Sequence[str], file: Path) -> None:
    written: Any = torch.onnx.export(
        program,
        opset_version=_OPSET,
        input_names=["images"],
        output_names=list(outputs),
        verbose=False,
    )
    written.save(file)


def _openvino(program: torch.export.ExportedProgram, outputs: Sequence[str], file: Path) -> None:
    import openvino

    between = file.with_suffix(".onnx")
    _onnx(program, outputs, between)  # OpenVINO reads more models from ONNX than from torch
    openvino.save_model(openvino.Core().read_model(between), file, compress_to_fp16=False)
    # Weights of 2 GB and more are files of their own.
    for left in file.parent.glob(f"{between.name}*"):
        left.unlink()


FORMATS = {
    "onnx": Format("model.onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx),
    "torch_export": Format("model.pt2", (), _torch_export),
    "openvino": Format("model.xml", ("openvino", "onnx", "onnxscript"), _openvino),
}
