"""What happens in a step: models of timm, batch norm, optimizer and schedule, warm-up."""

from typing import TYPE_CHECKING

from common.imports import export_lazily
from common.patches.timm import import_timm

if TYPE_CHECKING:
    from common.training.batch_norm import freeze_modules
    from common.training.compiling import compile_model
    from common.training.layers import prepare_layers
    from common.training.optimizer import (
        Schedule,
        build_ema,
        build_optimizer,
        build_schedule,
        count_steps,
        set_learning_rate,
    )
    from common.training.timm_models import (
        build_classifier,
        check_export,
        checkpoint_gradients,
        resolve_data_config,
    )

__all__, __getattr__ = export_lazily(__name__)

import_timm()  # before the modules of this room do
