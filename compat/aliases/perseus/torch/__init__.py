"""`perseus.torch`: `horovod` is compat.horovod."""

from compat.horovod.aliases import alias

alias("perseus.torch.horovod")
