"""`perseus.torch`: `horovod` is compat.horovod, `nn` is torch.nn with its submodules such as `nn.parallel`."""

import sys

from torch import nn

from compat.horovod.aliases import alias

alias("perseus.torch.horovod")
for _name, _module in [*sys.modules.items()]:
    if f"{_name}.".startswith(f"{nn.__name__}."):
        sys.modules[f"perseus.{_name}"] = _module
