"""What is bent in other people's libraries, in one module for each: the reason, and the version to
look at again.
"""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.patches.accelerate import skip_search_for_lomo
    from common.patches.huggingface_hub import go_offline
    from common.patches.multiprocessing import call_on_unsent
    from common.patches.timm import import_timm, orthogonalize_shards
    from common.patches.torch import change_class
    from common.patches.wandb import drop_exit_hook

__all__, __getattr__ = export_lazily(__name__)
