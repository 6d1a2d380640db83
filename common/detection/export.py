"""How does a trained detector become a folder that others can load?"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def export(model: torch.nn.Module, settings: dict, classes: tuple[str, ...], results: dict, folder: Path) -> None:
    """Write weights, what they belong to (`settings`), class names and results into a new folder."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings | {"classes": list(classes)}, indent=2) + "\n")
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
