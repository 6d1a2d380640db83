"""`perseus.torch.horovod`, a vendor's edition of Horovod (AIACC), is compat.horovod:
PYTHONPATH=compat/aliases.
"""
