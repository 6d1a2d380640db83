"""Splits of shards: opens those that `--data` names, by the words for training and validation data
in their names.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from common.config.secrets import redact_name
from common.data.data_spec import DataSplits, get_split_names
from common.data.splits import group_by_split
from common.data.stream import Blocks
from common.distributed.collectives import all_or_none, broadcast_object, is_main
from common.errors import Refused
from common.shards import ranges
from common.shards.entries import KeptColumns, ShardList
from common.shards.index import open_index
from common.shards.names import is_parquet, is_remote, list_hub_shards, list_shards
from common.shards.source import Shards, share_blocks

_NUM_THREADS = 16  # that look at shards


def open_splits(spec: Any) -> DataSplits[Shards]:
    """The splits of the labelled shards that `spec.data` names. A collective. Raises `Refused`."""
    split_texts, sources = open_sources(spec, spec.label_column)
    first = next(iter(sources.values()))
    matched = {}
    for name, source in sources.items():
        matched[name] = _match_classes(source, first, split_texts[name])
    min_classes = 1 if first.multi_label else spec.min_classes
    if len(first.classes) < min_classes:
        shown = redact_name(spec.data)
        raise Refused(
            f"--data {shown}: only the class {first.classes[0]} in its labels; needs "
            f"{min_classes} or more"
        )
    return DataSplits(split_texts, lambda names: [matched[name] for name in names])


def open_sources(
    spec: Any, label: str, columns: KeptColumns | None = None
) -> tuple[dict[str, str], dict[str, Shards]]:
    """How messages call each split of the shards, and the sources of those that are used.

    Each source has its own classes. A collective. Raises `Refused`.
    """
    with all_or_none("looking for shards"):
        names_by_split = (
            list_hub_shards(spec.data) if spec.streaming else group_by_split(list_shards(spec.data))
        )
    split_texts = {}
    for split in names_by_split:
        split_texts[split] = f"the {split} shards"
    if len(split_texts) == 1:
        split_texts = dict.fromkeys(split_texts, "all shards")
    group = "" if columns else spec.group_column  # boxes keep the column themselves
    sources = {}
    for split in get_split_names(spec.choose_subsets(split_texts)):
        sources[split] = _open(names_by_split[split], spec.image_column, label, columns, group)
    return split_texts, sources


def open_unlabelled(spec: Any, read_header: Callable[[bytes], Sequence[int]] | None) -> Shards:
    """All images of the shards that `spec.data` names. A collective. Raises `Refused`."""
    with all_or_none("looking for shards"):
        names_by_split = (
            list_hub_shards(spec.data) if spec.streaming else {"": list_shards(spec.data)}
        )
        names = list(chain.from_iterable(names_by_split.values()))
    no_columns = KeptColumns(find=lambda *_: (), keys=(), read_header=read_header)
    source = _open(names, spec.image_column, label="", columns=no_columns)
    return share_blocks([source], spec.shard_memory)[0]


def _open(
    names: Sequence[str], image: str, label: str, columns: KeptColumns | None, group: str = ""
) -> Shards:
    """The source of the shards of these names. A collective. Raises `Refused`."""
    is_local = not is_remote(names[0])
    stamps: list[ranges.Stamp] = []
    with all_or_none("looking at shards"), ThreadPoolExecutor(_NUM_THREADS) as pool:
        if is_main() or is_local:  # files are looked at on each machine, others only once
            stamps = list(pool.map(ranges.stat, names))
    if not is_local:
        stamps = broadcast_object(stamps)
    shards = ShardList(
        names=tuple(names),
        stamps=tuple((size, tag) for size, tag in stamps),
        image=image,
        label=label,
        columns=columns,
        group=group,
    )
    index = open_index(shards)
    has_blocks = not is_local or is_parquet(names[0])
    return Shards(
        entries=index.entries,
        index=index,
        blocks=Blocks(index.edges, pool=0) if has_blocks else None,
        labels=index.labels,
        classes=index.classes,
        groups=index.groups,
        notes=index.notes,
    )


def _match_classes(source: Shards, first: Shards, split_text: str) -> Shards:
    """`source` with the classes of `first`. Raises `Refused` for a class that `first` does not have."""
    if source.multi_label != first.multi_label:
        raise Refused(
            f"{split_text}: labels are lists in some splits of the data only; write them alike"
        )
    unknown = sorted(set(source.classes) - set(first.classes))
    if unknown:
        raise Refused(
            f"{split_text}: a class that {first.index.shards} do not have: {unknown[0]}; add it there"
        )
    if source.classes == first.classes:
        return source
    class_ids = np.array([first.classes.index(name) for name in source.classes])
    if source.multi_label:
        labels = np.zeros((len(source), len(first.classes)), bool)
        labels[:, class_ids] = source.labels
    else:
        labels = class_ids[source.labels]
    return replace(source, labels=labels, classes=first.classes)
