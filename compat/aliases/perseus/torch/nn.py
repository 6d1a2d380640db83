"""`perseus.torch.nn`: torch.nn, with its submodules such as `perseus.torch.nn.parallel`."""

import sys

import torch.nn  # noqa: F401

for _name, _module in [*sys.modules.items()]:
    if f"{_name}.".startswith("torch.nn."):
        sys.modules[f"perseus.{_name}"] = _module
