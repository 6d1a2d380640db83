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
MAX_PIXELS = 2**16  # of a side of a picture
_EXAMPLE_SIZE = (96, 160)  # height and width of the picture that exporters trace


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
        missing = []
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                missing.append(package)
        if missing:
            raise Refused(
                f"--to {name}: needs {', '.join(missing)}: pip install {' '.join(missing)}"
            )


def write(
    name: str, module: torch.nn.Module, batched: bool, outputs: Sequence[str], folder: Path
) -> None:
    """Write the module in the format `name` into `folder`.

    The module takes one picture, or any number if it is `batched`. Raises `Refused` if torch or the
    format can't express it.
    """
    form = FORMATS[name]
    shapes = {
        2: torch.export.Dim("height", min=1, max=MAX_PIXELS),
        3: torch.export.Dim("width", min=1, max=MAX_PIXELS),
    }
    batch_size = 1
    if batched:
        batch_size = 2  # exporters take a size of 1 for a constant
        shapes[0] = torch.export.Dim("batch", min=1)
    example = torch.zeros(batch_size, 3, *_EXAMPLE_SIZE, dtype=torch.uint8)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of exporters, about their own code
            program = torch.export.export(module.eval(), (example,), dynamic_shapes=(shapes,))
            form.write(program, outputs, folder / form.file)
    except Exception as error:  # exporters raise almost anything
        reason = next(iter(str(error).strip().splitlines()), "")
        raise Refused(
            f"--to {name}: the model can't be written ({type(error).__name__}: {reason:.300}); "
            "try another format"
        ) from error


def _write_torch_export(
    program: torch.export.ExportedProgram, _: Sequence[str], file: Path
) -> None:
    torch.export.save(program, file)


def _write_onnx(program: torch.export.ExportedProgram, outputs: Sequence[str], file: Path) -> None:
    from onnxscript.function_libs.torch_lib.ops.core import aten_sort

    onnx_program: Any = torch.onnx.export(
        program,
        opset_version=_OPSET,
        # A stable sort has no translation of its own. `aten_sort` becomes TopK, which puts the lower
        # of the indices of equal values first.
        custom_translation_table={torch.ops.aten.sort.stable: aten_sort},
        input_names=["images"],
        output_names=list(outputs),
        verbose=False,
    )
    onnx_program.save(file)


def _write_openvino(
    program: torch.export.ExportedProgram, outputs: Sequence[str], file: Path
) -> None:
    import openvino

    onnx_file = file.with_suffix(".onnx")
    _write_onnx(program, outputs, onnx_file)  # OpenVINO reads more models from ONNX than from torch
    openvino.save_model(openvino.Core().read_model(onnx_file), file, compress_to_fp16=False)
    # Weights of 2 GB and more are files of their own.
    for scratch_file in file.parent.glob(f"{onnx_file.name}*"):
        scratch_file.unlink()


FORMATS = {
    "onnx": Format("model.onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx),
    "torch_export": Format("model.pt2", (), _write_torch_export),
    "openvino": Format("model.xml", ("openvino", "onnx", "onnxscript"), _write_openvino),
}
