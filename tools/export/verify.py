"""Verification of an exported model by its runtime alone.

    python verify.py [FOLDER]

It compares the files with the hashes in export.json, and what the model makes of the ten pictures
in vectors.npz with what the trained model made of them. It prints one line, and exits with 0 if all
is as it was measured. It needs NumPy and the runtime: onnxruntime, openvino, or for torch_export
torch. `open_model` is also an example of how to use the model.
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
    """Open the model `file` in the format `name`: uint8[N, 3, H, W] -> its `outputs` by name."""
    path = str(folder / file)
    if name == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

        def run(images):
            return session.run(outputs, {"images": images})

    elif name == "openvino":
        import openvino

        # Not bfloat16, which is the default where the processor has it.
        exactly = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(path, "CPU", exactly)

        def run(images):
            return [compiled([images])[output].copy() for output in outputs]

    else:
        import torch

        if "boxes" in outputs:
            import torchvision  # noqa: F401  # has operators of detectors

        module = torch.export.load(path).module()

        def run(images):
            with torch.no_grad():
                result = module(torch.from_numpy(images))
            if isinstance(result, torch.Tensor):
                result = [result]
            return [array.numpy() for array in result]

    return lambda images: dict(zip(outputs, run(images), strict=True))


def describe_difference(
    expected: dict[str, np.ndarray], actual: dict[str, np.ndarray], tolerance: dict[str, float]
) -> str:
    """How the outputs for one picture differ by more than `tolerance`; "" if they don't."""
    if "boxes" in expected:
        missing = find_unmatched(expected, actual, tolerance)
        if missing:
            return f"missing: {missing}"
        new = find_unmatched(actual, expected, tolerance)
        return f"new: {new}" if new else ""
    for name, values in expected.items():
        if actual[name].shape != values.shape:
            return f"{name} have the shape {actual[name].shape}, not {values.shape}"
        if name == "ids":  # of classes: the share of pixels with another one
            largest = (actual[name] != values).mean()
        else:
            largest = np.abs(actual[name].astype(np.float64) - values).max(initial=0.0)
        if not largest <= tolerance[name]:
            return f"{name} differ by {largest:.2g}, the limit is {tolerance[name]:.2g}"
    return ""


def find_unmatched(
    detections: dict[str, np.ndarray],
    candidates: dict[str, np.ndarray],
    tolerance: dict[str, float],
) -> str:
    """Describe the first detection that has no counterpart among the candidates; "" if all have one.

    Detections have an order of their own where scores are nearly equal, and may be missing if their
    score is nearly the lowest.
    """
    scores = list(detections["scores"])
    candidate_scores = list(candidates["scores"])
    if len(candidate_scores) < len(scores):
        candidate_scores = [0.0]
    lowest = min([1.0] + scores + candidate_scores)
    for box, score, label in zip(detections["boxes"], scores, detections["labels"], strict=True):
        is_near = candidates["labels"] == label
        is_near &= np.abs(candidates["scores"] - score) <= tolerance["scores"]
        is_near &= (np.abs(candidates["boxes"] - box) <= tolerance["boxes"]).all(1)
        if score > lowest + tolerance["scores"] and not is_near.any():
            return f"{label} with score {score:.4f} at {np.round(box, 1).tolist()}"
    return ""


def find_fault(folder: Path) -> str:
    """Find the fault of the exported model in `folder`; "" if there is none."""
    about = json.loads((folder / "export.json").read_text())
    for file, digest in about["files"].items():
        if not (folder / file).is_file():
            return f"{file} is missing"
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != digest:
            return f"{file} is not the file that was measured (its SHA-256 differs)"
    session = open_model(folder, about["format"], about["model"], list(about["outputs"]))
    with np.load(folder / "vectors.npz", allow_pickle=False) as vectors:
        for i, name in enumerate(about["vectors"]):
            # Masks are not compared.
            names = [output for output in about["outputs"] if f"{output}_{i}" in vectors]
            expected = {output: vectors[f"{output}_{i}"] for output in names}
            actual = session(vectors[f"picture_{i}"])
            if about["batched"]:
                actual = {output: array[0] for output, array in actual.items()}
            difference = describe_difference(expected, actual, about["tolerance"])
            if difference:
                return f"{name}: {difference}"
    return ""


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    try:
        fault = find_fault(folder)
    except Exception as error:  # a damaged file makes a runtime raise almost anything
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(f"{folder}: {fault or 'every picture gives what was measured'}")
    sys.exit(1 if fault else 0)
