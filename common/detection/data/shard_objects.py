"""Images with boxes in shards: a table of the objects, beside images that lie in the shards."""

from dataclasses import replace
from typing import Any

from common.config.secrets import redact_name
from common.data.data_spec import DataSplits
from common.data.tables import Split
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.image_headers import read_header
from common.detection.data.object_tables import EXTRA_COLUMNS, find_objects, open_object_tables
from common.shards import KeptColumns, open_sources


def open_splits(spec: Any) -> DataSplits[AnnotatedImages]:
    """The splits of the shards that `spec.data` names. A collective. Raises `Refused`."""
    import datasets

    columns = _keep_columns(spec.objects_column, spec.group_column)
    split_texts, images = open_sources(spec, spec.objects_column, columns)
    splits = {}
    for name, source in images.items():
        rows = datasets.Dataset(datasets.table.InMemoryTable(source.index.rows))
        splits[name] = Split(redact_name(spec.data), name, rows)
    data_splits = open_object_tables(splits, spec, images)
    return replace(data_splits, split_texts=split_texts)


def _keep_columns(objects_column: str, group_column: str) -> KeptColumns:
    """The columns of shards that are kept: the objects, and others that a table of objects may have."""
    extra_columns: tuple[str, ...] = EXTRA_COLUMNS
    if group_column:
        extra_columns += (group_column,)

    def find(split: Split, _image: str) -> list[str]:
        columns = [find_objects(split, objects_column)]
        return columns + [name for name in extra_columns if name in split.kinds]

    keys = (objects_column or "objects",) + extra_columns
    return KeptColumns(find, keys=keys, read_header=read_header)
