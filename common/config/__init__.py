"""Configuration: fields, flags, YAML files, and the run that weights came from."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.config.fields import (
        OptimizationConfig,
        RunConfig,
        option,
        path_option,
        split_integers,
    )
    from common.config.origin import Origin, get_class_names
    from common.config.parsing import parse

__all__, __getattr__ = export_lazily(__name__)
