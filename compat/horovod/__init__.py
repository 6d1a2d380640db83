"""The Horovod API on torch.distributed: `import compat.horovod as hvd` in a script written for Horovod."""
