"""`import perseus.torch.horovod as hvd`: the module compat.horovod."""

from compat.horovod.aliases import alias

alias(__name__)
