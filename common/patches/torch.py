"""torch, as of 2.14."""

from torch import nn


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module compute what a `kind` does, which has the same parameters and buffers.

    torch has no other way for a layer inside a stranger's model: a new module would lose the hooks,
    and other attributes that point to the layer would keep the old one. torch's own `fully_shard`
    and `parametrize` do it like this.
    """
    module.__class__ = kind
