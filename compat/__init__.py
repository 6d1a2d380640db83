"""Interfaces of other systems, on torch.distributed."""
