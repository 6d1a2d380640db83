"""The spelling `import compat.horovod.torch as hvd`: the same module as `compat.horovod`."""

from compat.horovod.aliases import alias

alias(__name__)
