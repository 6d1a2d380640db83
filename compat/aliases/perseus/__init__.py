"""`perseus`, a vendor's edition of Horovod, as a name of compat.horovod: PYTHONPATH=compat/aliases."""

from compat.horovod.aliases import warn_of_installed

warn_of_installed("perseus", __file__)
