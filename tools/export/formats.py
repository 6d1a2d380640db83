"""Formats of exported models: what each needs, and how a module is written in it."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import Refused

_OPSET = 18  # of ONNX
_MOST = 16384  # pixels of a side, at most; runtimes allow more


@dataclass(frozen=True)
class Format:
    """A file format and the packages that write and run it."""

    file: str  # the model's name in its folder
    packages: tuple[str, ...]  # by the names under which pip installs them, which are those that Python imports
    write: Callable[[torch.nn.Module, bool, Sequence[str], Path], None]  # the module, batched, its outputs, the file

    def check(self, name: str) -> None:
        """Raise `Refused` if a package is missing."""
        if missing := [package for package in self.packages if importlib.util.find_spec(package) is None]:
            raise Refused(f"--to {name}: needs {', '.join(missing)}: pip install {' '.join(missing)}")


def write(name: str, module: torch.nn.Module, batched: bool, outputs: Sequence[str], folder: Path) -> None:
    """Write the module in the format `name` into `folder`. Raises `Refused` if torch or the format can't express it."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of exporters, about their own code
            FORMATS[name].write(module.eval(), batched, outputs, folder / FORMATS[name].file)
    except Exception as error:  # exporters raise almost anything
        reason = next(iter(str(error).strip().splitlines()), "")
        raise Refused(
            f"--to {name}: the model can't be written ({type(error).__name__}: {reason:.300}); try another format"
        ) from error


def _program(module: torch.nn.Module, batched: bool) -> torch.export.ExportedProgram:
    height, width = torch.export.Dim("height", min=1, max=_MOST), torch.export.Dim("width", min=1, max=_MOST)
    shapes = {2: height, 3: width} | ({0: torch.export.Dim("batch", min=1)} if batched else {})
    example = torch.zeros(1 + batched, 3, 96, 160, dtype=torch.uint8)
    return torch.export.export(module, (example,), dynamic_shapes=(shapes,))


def _torch_export(module: torch.nn.Module, batched: bool, outputs: Sequence[str], file: Path) -> None:
    torch.export.save(_program(module, batched), file)


def _onnx(module: torch.nn.Module, batched: bool, outputs: Sequence[str], file: Path) -> None:
    program = torch.onnx.export(
        _program(module, batched),
        dynamo=True,
        opset_version=_OPSET,
        input_names=["images"],
        output_names=list(outputs),
        verbose=False,
    )
    program.save(file)


def _openvino(module: torch.nn.Module, batched: bool, outputs: Sequence[str], file: Path) -> None:
    import openvino

    between = file.with_suffix(".onnx")
    _onnx(module, batched, outputs, between)
    openvino.save_model(openvino.Core().read_model(between), file, compress_to_fp16=False)
    between.unlink()


def _executorch(module: torch.nn.Module, batched: bool, outputs: Sequence[str], file: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = to_edge_transform_and_lower(_program(module, batched), partitioner=[XnnpackPartitioner()])
    file.write_bytes(program.to_executorch().buffer)


FORMATS = {
    "onnx": Format("model.onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx),
    "torch_export": Format("model.pt2", (), _torch_export),
    "openvino": Format("model.xml", ("openvino", "onnx", "onnxscript"), _openvino),
    "executorch": Format("model.pte", ("executorch",), _executorch),
}
