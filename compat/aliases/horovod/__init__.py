"""`horovod` as a name of compat.horovod, with PYTHONPATH=compat/aliases.

For scripts whose import line can't be changed.
"""

from compat.horovod import __getattr__  # noqa: F401 # what `horovod.run` is answered with
from compat.horovod.aliases import alias

alias("horovod.torch")
alias("horovod.common")  # for horovod.common.exceptions and horovod.common.process_sets
__version__ = "0.28.1"  # whose interface this is
