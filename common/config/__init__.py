"""Configuration: fields, flags, YAML files, and the run that weights came from."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.config.fields import (
        OptimizationConfig,
        RunConfig,
        option,
        path_option,
        whole_numbers,
    )
    from common.config.origin import Origin, label_names
    from common.config.parsing import parse

__all__, __getattr__ = export_lazily(__name__)
