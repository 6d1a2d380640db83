"""Images with boxes in shards: a table of the objects, which is read as others are, beside images
that lie elsewhere.
"""

from dataclasses import replace
from typing import Any

from common.config.secrets import redact_name
from common.data.data_spec import DataSplits
from common.data.tables import Split
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.image_headers import header_of
from common.detection.data.object_tables import BESIDE, find_objects, object_parts
from common.shards import KeptColumns, open_sources


def open_parts(spec: Any) -> DataSplits[AnnotatedImages]:
    """The parts of the shards that `spec.data` names. A collective. Raises `Refused`."""
    import datasets

    labels, images = open_sources(
        spec, spec.objects_column, _keep_columns(spec.objects_column, spec.group_column)
    )
    splits = {}
    for name, source in images.items():
        rows = datasets.Dataset(datasets.table.InMemoryTable(source.index.rows))
        splits[name] = Split(redact_name(spec.data), name, rows)
    parts = object_parts(splits, spec, images)
    return replace(parts, labels=labels)


def _keep_columns(objects: str, group: str) -> KeptColumns:
    """The columns of shards that are kept: the objects, and others that a table of objects may have."""
    beside = BESIDE + (group,) if group else BESIDE

    def find(split: Split, _image: str) -> list[str]:
        return [find_objects(split, objects)] + [name for name in beside if name in split.kinds]

    return KeptColumns(find, keys=(objects or "objects",) + beside, read_header=header_of)
