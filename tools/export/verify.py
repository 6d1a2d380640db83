"""Verification of an exported model by its runtime alone: prints one line, and exits with 0 if all
is as it was measured.

    python verify.py [FOLDER]

It compares the files with the hashes in export.json, and what the model makes of the ten pictures
in vectors.npz with what the trained model made of them. It needs NumPy and the runtime:
onnxruntime, openvino, or for torch_export torch. `open_model` is also an example of how to use the
model.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

# A picture uint8[1, 3, H, W], or several -> outputs by name.
Session = Callable[[np.ndarray], dict[str, np.ndarray]]


def open_model(folder: Path, name: str, file: str, outputs: list[str]) -> Session:
    """A session of the model `file` in the format `name`: uint8[N, 3, H, W] -> its `outputs` by name."""
    path, run = str(folder / file), None
    if name == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        run = lambda images: session.run(outputs, {"images": images})  # noqa: E731
    elif name == "openvino":
        import openvino

        # Not bfloat16, which is the default where the processor has it.
        exactly = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(path, "CPU", exactly)
        run = lambda images: [compiled([images])[output].copy() for output in outputs]  # noqa: E731
    else:
        import torch

        if "boxes" in outputs:
            import torchvision  # noqa: F401  # has operators of detectors

        module = torch.export.load(path).module()

        def run(images):
            with torch.no_grad():
                found = module(torch.from_numpy(images))
            return [
                array.numpy() for array in (found if isinstance(found, (tuple, list)) else [found])
            ]

    return lambda images: dict(zip(outputs, run(images), strict=True))


def difference(
    expected: dict[str, np.ndarray], found: dict[str, np.ndarray], tolerance: dict[str, float]
) -> str:
    """How the outputs for one picture differ by more than `tolerance`, or "".

    Detections have an order of their own where scores are nearly equal, and may be missing if their
    score is nearly the lowest.
    """
    if "boxes" in expected:
        for these, others, word in ((expected, found, "missing"), (found, expected, "new")):
            floor = (
                min([1.0, *others["scores"]])
                if len(others["scores"]) >= len(these["scores"])
                else 0.0
            )
            lowest = min([floor, *these["scores"]]) + tolerance["scores"]
            for box, score, label in zip(
                these["boxes"], these["scores"], these["labels"], strict=True
            ):
                near = others["labels"] == label
                near &= np.abs(others["scores"] - score) <= tolerance["scores"]
                near &= (np.abs(others["boxes"] - box) <= tolerance["boxes"]).all(1)
                if score > lowest and not near.any():
                    return f"{word}: {label} with score {score:.4f} at {np.round(box, 1).tolist()}"
        return ""
    for name, values in expected.items():
        if found[name].shape != values.shape:
            return f"{name} have the shape {found[name].shape}, not {values.shape}"
        apart = np.abs(found[name].astype(np.float64) - values)
        if not apart.max(initial=0.0) <= tolerance[name]:
            return f"{name} differ by {apart.max():.2g}, the limit is {tolerance[name]:.2g}"
    return ""


def verify(folder: Path) -> str:
    """The fault of the exported model in `folder`; "" if there is none."""
    about = json.loads((folder / "export.json").read_text())
    for file, digest in about["files"].items():
        if not (folder / file).is_file():
            return f"{file} is missing"
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != digest:
            return f"{file} is not the file that was measured (its SHA-256 differs)"
    session = open_model(folder, about["format"], about["model"], list(about["outputs"]))
    with np.load(folder / "vectors.npz", allow_pickle=False) as vectors:
        for number, name in enumerate(about["vectors"]):
            # Not masks.
            names = [output for output in about["outputs"] if f"{output}_{number}" in vectors]
            expected = {output: vectors[f"{output}_{number}"] for output in names}
            found = {
                output: array[0] if about["batched"] else array
                for output, array in session(vectors[f"picture_{number}"]).items()
            }
            if wrong := difference(expected, found, about["tolerance"]):
                return f"{name}: {wrong}"
    return ""


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    try:
        fault = verify(where)
    except Exception as error:  # a damaged file makes a runtime raise almost anything
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(f"{where}: {fault or 'every picture gives what was measured'}")
    sys.exit(1 if fault else 0)
