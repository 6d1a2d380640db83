"""Shards: samples are found where they lie, hostile ones are refused in one line, blocks come in a
fair order, once each.
"""

import io
import json
import multiprocessing
import os
import re
import struct
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from common.classification.sources import Spec, load
from common.data import workers as loader_workers
from common.data.loader import Prefetcher, create_eval_loader
from common.data.stream import Blocks, Stream
from common.detection.data.sources import Spec as BoxSpec
from common.detection.data.sources import load as load_boxes
from common.errors import Refused
from common.files import CACHE
from common.shards import block_cache, entries, ranges, tars
from common.shards import index as shard_index
from common.shards import source as shard_source
from common.shards.block_cache import open_blocks
from common.shards.source import Shards, share_blocks
from tests.harness.disks import disk
from tests.harness.odd_files import bounded
from tests.harness.photographs import encode
from tests.harness.processes import list_data_workers
from tests.harness.range_server import RangeServer
from tests.harness.shards import (
    COUNTS,
    add,
    draw_noise,
    list_class_images,
    write_parquet,
    write_tars,
)

PIXEL = encode(Image.new("RGB", (1, 1)))  # and whatever follows


def read(data, **options):
    return load(Spec(str(data), 0, 0.25, **options))


def read_refusal(data, **options) -> str:
    with bounded(), pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def build_tar(*members: tuple, kind: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of (name, content, {fact: value}...)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for name, content, *facts in members:
            add(tar, name, content, **(facts[0] if facts else {}))
    return file.getvalue()


def build_tar_with_json(*texts: bytes) -> bytes:
    """A tar of samples with these labels; the number of each follows in its image."""
    members = []
    for key, text in enumerate(texts):
        members += [(f"{key}.png", PIXEL + b"%d" % key), (f"{key}.json", text)]
    return build_tar(*members)


def read_contents(source) -> list[bytes]:
    """The bytes of all images."""
    return [source.get_content(i) for i in range(len(source))]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Class folders of 349 images."""
    return draw_noise(tmp_path_factory.mktemp("files"), (130, 110, 109), side=8)


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    """The same images as tars and Parquet behind a web server."""
    root = tmp_path_factory.mktemp("served")
    write_tars(files, root / "tars", "train")
    write_parquet(files, root / "parquet", "train")
    with RangeServer() as server:
        for file in root.glob("*/*"):
            server.files[f"/{file.relative_to(root)}"] = file.read_bytes()
        yield server


# ---- what is in shards


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_labels_of_any_kind_are_read(tmp_path, kind):
    folder = "/".join(["long" * 20] * 5) + "/ü"
    if kind == tarfile.USTAR_FORMAT:
        folder = "/".join(["long" * 8] * 5)
    members = (
        (f"{folder}/a.json", json.dumps({"label": 3, "text": "no"}).encode()),
        (f"{folder}/a.jpg", PIXEL),
        ("../../etc/passwd.cls", b"3\n"),
        ("../../etc/passwd.JPG", b"second"),
        ("b.c.png", b"third"),
        ("b.cls", b"12"),
        ("alone.cls", b"12"),
    )
    (tmp_path / "a.tar").write_bytes(build_tar(*members, kind=kind))
    index = read(tmp_path / "a.tar", is_eval_only=True)[0]
    assert read_contents(index) == [PIXEL, b"second", b"third"]
    assert index.classes == ("3", "12") and index.labels.tolist() == [0, 0, 1]
    assert index.notes == ("4 samples, left out: 1 (no image), first alone",)
    for i, name in enumerate((f"{folder}/a.jpg", "../../etc/passwd.JPG", "b.c.png")):
        assert index.get_name(i) == f"{tmp_path}/a.tar/{name}"
    (tmp_path / "a.tar").unlink()  # a list of names reads nothing
    for i, start in enumerate(index.entries["start"].tolist()):
        assert index.get_listed_name(i) == f"{tmp_path}/a.tar/byte {start}"


def test_labels_are_lists_or_named_and_parts_share_classes(tmp_path):
    rows = [b'{"tags": ["x", "y"], "n": 1}', b'{"tags": [], "n": 2}', b'{"tags": ["z"], "n": 5}']
    (tmp_path / "pets-train-000.tar").write_bytes(build_tar_with_json(*rows))
    (tmp_path / "pets-val-000.tar").write_bytes(build_tar_with_json(rows[2]))
    train, val = read(tmp_path, label_column="tags")
    z = [False, False, True]
    assert train.multi_label
    assert train.labels.tolist() == [[True, True, False], [False, False, False], z]
    assert val.labels.tolist() == [z]
    assert val.classes == train.classes == ("x", "y", "z")
    train, val = read(tmp_path, label_column="n")
    assert train.classes == ("1", "2", "5")
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1, 2], [2])
    assert (train.split_text, val.split_text) == ("the train shards", "the val shards")
    assert val.class_counts.tolist() == [0, 0, 1] and train.class_counts.tolist() == [1, 1, 1]
    assert "has no label: neither 0.cls nor a label in its .json" in read_refusal(tmp_path)


@pytest.mark.parametrize("kind", ["tars", "parquet"])
def test_samples_of_a_group_are_held_out_together(server, tmp_path, kind):
    patients = [f"p{number % 12}" for number in range(60)]
    if kind == "tars":
        texts = []
        for i, patient in enumerate(patients):
            texts.append(json.dumps({"label": i % 2, "patient": patient}).encode())
        data = tmp_path / "all.tar"
        data.write_bytes(build_tar_with_json(*texts))
    else:
        images = [PIXEL + b"%d" % number for number in range(60)]
        table = pa.table({"image": images, "label": ["a", "b"] * 30, "patient": patients})
        server.files["/groups/all.parquet"] = build_parquet(table, row_group_size=7)
        data = f"{server.url}/groups/all.parquet"
    sides = read(data, group_column="patient")
    groups = []
    for source in sides:
        indices = [int(content.removeprefix(PIXEL)) for content in read_contents(source)]
        groups.append({patients[i] for i in indices})
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 12
    assert [len(source) for source in sides] == [40, 20]
    assert "--group_column site" in read_refusal(data, group_column="site")


def test_the_same_images_are_held_out_from_shards_as_from_files(files, server, tmp_path):
    write_tars(files, tmp_path / "tars", "train")
    store = fsspec.filesystem("memory")
    for path, data in server.files.items():
        if "/tars/" in path:
            store.pipe(f"/{path.rpartition('/')[2]}", data)
    for data in (tmp_path / "tars", f"{server.url}/tars/train-{{000..002}}.tar", "memory://*.tar"):
        for expected, actual in zip(read(files), read(data), strict=True):
            assert np.array_equal(expected.labels, actual.labels)
            contents = [Path(path).read_bytes() for path in read_contents(expected)]
            assert read_contents(actual) == contents
            subset = actual.select(np.arange(3, 60, 7))
            assert read_contents(subset) == contents[3:60:7]
            assert subset.get_name(0) == actual.get_name(3)
            assert subset.fingerprint != actual.fingerprint


def test_parquet_at_a_url_has_the_images_of_the_files(files, server, tmp_path):
    write_parquet(files, tmp_path, "train")
    for folder in (f"file://{tmp_path}", f"{server.url}/parquet"):  # by fsspec, and over http
        source = read(f"{folder}/train-{{000..002}}.parquet", is_eval_only=True)[0]
        contents = [file.read_bytes() for file in list_class_images(files)]
        assert read_contents(source) == contents
    assert source.get_name(20) == f"{server.url}/parquet/train-002.parquet: row 2 of row group 0"
    assert np.diff(source.blocks.edges).tolist() == [1, 5, 5, 5, 2] + [5] * 66 + [1]


# ---- hostile shards

GOOD = (("a.cls", b"1"), ("a.png", PIXEL))


HOSTILE = {
    "cut off": (
        build_tar(("a.png", b"i" * 5000))[:2048],
        "says that it has 5000 bytes, and the shard ends before",
    ),
    "a wrong checksum": (b"x" * 148 + b"0" * 10240, "byte 0: bad checksum"),
    "damage in the middle": (
        build_tar(*GOOD)[:1024] + b"x" * 10240,
        "the member at byte 1024: no header of a tar: cut off, or damaged",
    ),
    "a label of a MiB": (
        build_tar(("a.png", b"i"), ("a.cls", b"1" * (2**20 + 1))),
        "the limit is 1048576",
    ),
    "deep JSON": (build_tar_with_json(b"[" * 10**5), "0.json is not readable"),
    "odd JSON": (build_tar_with_json(b'{"label": {"a": 1}}'), "no number, text or list"),
    "one label and a list": (
        build_tar_with_json(b'{"label": ["a"]}', b'{"label": "abc"}'),
        "some samples have one label, others a list",
    ),
    "a 0 or 1 for each class": (
        build_tar_with_json(b"[1, 0]", b"[0, 1]"),
        "row 0, as each one, has both classes",
    ),
    "two images": (
        build_tar(*GOOD, ("a.jpg", b"other")),
        "a.png and a.jpg could each be the image",
    ),
    "nothing": (b"", "byte 0: empty file"),
    "no samples": (build_tar(), "no sample with an image"),
    "garbage behind its end": (
        build_tar(*GOOD) + b"x" * 512,
        "the member at byte 10240: no header of a tar",
    ),
    "a header of 5 MB": (
        build_tar(
            ("a.png", b"i", {"pax_headers": {"comment": "x" * 5_000_000}}), kind=tarfile.PAX_FORMAT
        ),
        "the member at byte 0: its headers have more than 65,536 bytes",
    ),
    "few images": (
        build_tar(*GOOD, ("b.cls", b"1"), ("c.cls", b"1")),
        "most of its 3 samples would be left out: 2 (no image), first b; name the kind of file "
        "with --image_column",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tars_are_refused_by_a_line_with_the_shard(tmp_path, kind):
    content, text = HOSTILE[kind]
    (tmp_path / "a.tar").write_bytes(content)
    message = read_refusal(tmp_path / "a.tar", is_eval_only=True)
    assert text in message and str(tmp_path / "a.tar") in message
    assert [file.name for file in tmp_path.rglob("*")] == ["a.tar"]


@pytest.mark.parametrize("text", [b'"objects"', b"5", b'["objects"]'])
def test_a_json_for_boxes_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "a.tar").write_bytes(build_tar_with_json(text))
    with (
        bounded(),
        pytest.raises(Refused, match=re.escape(f"0.json holds {text.decode()}, and no keys")),
    ):
        load_boxes(BoxSpec(str(tmp_path / "a.tar"), 0, 0.25))


def test_tars_behind_tars_are_read_to_their_end(tmp_path):
    contents = [PIXEL + b"a", PIXEL + b"b", PIXEL + b"c"]
    with (tmp_path / "a.tar").open("wb") as file:
        for i, content in enumerate(contents):
            file.write(build_tar((f"{i}.cls", b" 1\n"), (f"{i}.png", content)))
    source = read(tmp_path / "a.tar", is_eval_only=True)[0]
    assert read_contents(source) == contents


def test_links_sparse_files_and_devices_are_no_images(tmp_path):
    odd = {"l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "d": tarfile.CHRTYPE, "f": tarfile.FIFOTYPE}
    members = [("s.png", b"sparse", {"type": tarfile.GNUTYPE_SPARSE})]
    for key, kind in odd.items():
        members.append((f"{key}.png", b"", {"type": kind, "linkname": "/etc/passwd"}))
    members += [(f"{key}.cls", b"1") for key in odd]
    for key in "vwxyz":
        members += [(f"{key}.cls", b"1"), (f"{key}.png", PIXEL)]
    (tmp_path / "a.tar").write_bytes(build_tar(*members))
    source = read(tmp_path / "a.tar", is_eval_only=True)[0]
    assert read_contents(source) == [PIXEL] * 5
    assert source.notes == ("9 samples, left out: 4 (no image), first l",)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]


def build_rows(images: list, labels: list) -> bytes:
    """Parquet."""
    return build_parquet(pa.table({"image": images, "label": labels}))


def build_parquet(table: pa.Table, **options) -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(table, file, **options)
    return file.getvalue().to_pybytes()


ONE = build_rows([b"i"], [1])
HALF = len(ONE) // 2
PARQUET = {
    "a wrong footer": (ONE[:-8] + struct.pack("<I", 2**31) + b"PAR1", "its footer is damaged"),
    "a damaged footer": (ONE[:HALF] + b"\xff" * (len(ONE) - HALF - 8) + ONE[-8:], "a.parquet: "),
    "a column twice": (
        build_parquet(
            pa.Table.from_arrays(
                [pa.array([b"i"])] * 2 + [pa.array([1])], ["image", "image", "label"]
            )
        ),
        "a.parquet: two columns are named image; rename one",
    ),
    "rows without bytes": (
        build_parquet(pa.table({"label": pa.nulls(2**24 + 10**5)})),
        "its footer names 16,877,216 rows",
    ),
    "damaged pages": (ONE[:4] + b"\xff" * 40 + ONE[44:], "damaged, or "),
    "no label": (build_rows([b"i"] * 2, [1, None]), "row 1 has no label in column label (null)"),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_hostile_parquet_at_a_url_is_refused_in_one_line(server, kind):
    path = f"/{list(PARQUET).index(kind)}/a.parquet"
    content, text = PARQUET[kind]
    server.files[path] = content
    with bounded(), pytest.raises(Refused) as refused:
        read(f"{server.url}{path}", is_eval_only=True)[0].get_content(0)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_labels_beyond_int64_are_read(server):
    server.files["/u.parquet"] = build_rows([PIXEL] * 2, pa.array([2**64 - 1, 7], pa.uint64()))
    assert read(f"{server.url}/u.parquet", is_eval_only=True)[0].classes == ("7", str(2**64 - 1))


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_images_that_parquet_repeats_are_kept_once(server, encoding):
    """The footer says 1 MiB for a row group whose images are 100 MiB in full."""
    size = 2**20 if encoding == "RLE_DICTIONARY" else 100
    images = [b"0" * size, PIXEL]
    column = pa.DictionaryArray.from_arrays(
        pa.array([0, 1] * 100, pa.int32()), pa.array(images, pa.binary())
    )
    options = {}
    if encoding != "RLE_DICTIONARY":
        column = column.cast(pa.binary())
        options = {"use_dictionary": False, "column_encoding": {"image": encoding}}
    table = pa.table({"image": column, "label": [0, 1] * 100})
    server.files["/a.parquet"] = build_parquet(
        table, compression="zstd", row_group_size=200, **options
    )
    source = read(f"{server.url}/a.parquet", is_eval_only=True)[0]
    (source,) = share_blocks([source], 20)
    assert source.cache.room < 2**21
    assert [source.get_content(index) for index in (0, 1, 198, 199)] == images * 2


# ---- the index


def test_headers_that_were_overwritten_with_zeros_have_no_name():
    assert tars.read_name(bytes(1536)) == "", "the start of a run would never end"


def test_an_index_is_kept_until_a_shard_changes(files, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    write_tars(files, tmp_path / "tars", "train")
    before = read(tmp_path / "tars")
    shard = tmp_path / "tars/train-000.tar"
    stat = shard.stat()
    shard.write_bytes(b"x" * stat.st_size)  # an index that was made again would refuse it
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for reread, source in zip(read(tmp_path / "tars"), before, strict=True):
        assert reread.fingerprint == source.fingerprint
    shard.write_bytes(build_tar(*GOOD))
    for source in before:
        for i in np.flatnonzero(source.entries["shard"] == 0).tolist():
            with pytest.raises(
                Refused, match=r"train-000.tar: byte 512: it has changed since it was indexed"
            ):
                source.get_content(i)
    assert read(tmp_path / "tars")[0].fingerprint != before[0].fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2


DAMAGE = {
    "a byte": lambda file: file.write_bytes(file.read_bytes()[:-3] + b"?" + file.read_bytes()[-2:]),
    "cut off": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "gone": Path.unlink,
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    members = []
    for i in range(20):
        members += [(f"{i}.cls", b"%d" % (i % 4)), (f"{i}.png", PIXEL + b"%d" % i)]
    (tmp_path / "a.tar").write_bytes(build_tar(*members))
    before = read(tmp_path / "a.tar", is_eval_only=True)[0]
    (cache_file,) = (tmp_path / "cache").iterdir()
    names = sorted(file.name for file in cache_file.iterdir())
    assert names == ["edges.npy", "entries", "facts.json", "labels.npy"]
    for name in names:
        DAMAGE[damage](cache_file / name)
        with bounded():
            remade = read(tmp_path / "a.tar", is_eval_only=True)[0]
        assert remade.labels.tolist() == before.labels.tolist()
        assert remade.fingerprint == before.fingerprint
        assert remade.get_content(3) == PIXEL + b"3" and remade.classes == before.classes
        assert (cache_file / name).is_file() and not list((tmp_path / "cache").glob("unfinished-*"))


def test_an_index_of_shards_without_a_tag_is_not_kept(server, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))
    server.tags["/get.tar"] = ""
    for key in "ab":
        label = key.encode()
        server.files["/get.tar"] = build_tar(("a.cls", label), ("a.png", PIXEL))
        assert read(f"{server.url}/get.tar", is_eval_only=True)[0].classes == (key,)
    assert not list(tmp_path.iterdir())


def test_without_room_for_the_index_a_run_has_no_cache(files, tmp_path, monkeypatch):
    write_tars(files, tmp_path / "tars", "train")
    with disk(tmp_path / "small", "4k") as small:
        monkeypatch.setenv(CACHE, str(small))
        assert len(read(tmp_path / "tars", is_eval_only=True)[0]) == 349
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        line = read_refusal(tmp_path / "tars", is_eval_only=True)
        assert not list(small.iterdir())
    message = f"the index of shards can't be written to {small}: No space left on device; make room"
    assert f"{message} there" in line


def test_an_archive_in_an_image_folder_makes_no_shards_of_it(tmp_path):
    draw_noise(tmp_path, (6, 6), side=8)
    for name in ("class 0/old.tar", "backup.tar", "._backup.tar"):
        (tmp_path / name).write_bytes(build_tar(*GOOD))
    train, _ = read(tmp_path)
    assert train.classes == ("class 0", "class 1")
    assert "1 *.tar beside the class folders are not read, first backup.tar" in train.notes
    (tmp_path / "shards/train").mkdir(parents=True)
    for name in ("a.tar", "b.tar", "._a.tar", "preview.png"):
        (tmp_path / "shards/train" / name).write_bytes(build_tar(("a.cls", name.encode()), GOOD[1]))
    assert read(tmp_path / "shards", is_eval_only=True)[0].classes == ("a.tar", "b.tar")


def read_on_ranks(data: str, at_once: int) -> tuple[str, list[str]]:
    entries._AT_ONCE = at_once
    source = read(data, is_eval_only=True)[0]
    return source.fingerprint, [source.get_name(i) for i in range(0, len(source), 20)]


def test_ranks_make_the_index_together(files, processes, tmp_path):
    """Of seven shards, which are three turns of three ranks, in the order in which one process reads them."""
    write_tars(files, tmp_path, "train", (40, 1, 70, 30, 30, 100, 78))
    answers = processes.run(read_on_ranks, str(tmp_path), 1, ranks=3)
    assert answers == [read_on_ranks(str(tmp_path), 8)] * 3


def test_a_start_with_an_index_of_a_billion_samples_is_quick(tmp_path):
    """The files are sparse: 36 GB that take no room, and would take minutes to read."""
    count = 10**9
    (tmp_path / "entries").touch()
    os.truncate(tmp_path / "entries", entries.ENTRY.itemsize * count)
    np.lib.format.open_memmap(tmp_path / "labels.npy", "w+", np.int64, (count,))
    np.save(tmp_path / "edges.npy", np.arange(0, count + 1, 400))
    facts = {
        "classes": ["a", "b"],
        "counts": [count, 0],
        "fingerprint": "0",
        "notes": [],
        "block_bytes": 100,
    }
    shard_index._seal(tmp_path, facts)
    began = time.process_time()
    index = shard_index._load(tmp_path, entries.ShardList(("a.tar",), ((0, ""),), "", ""))
    source = Shards(index.entries, index, labels=index.labels, classes=index.classes)
    assert len(source) == count and source.class_counts.sum() == count and source.fingerprint == "0"
    stream = Stream(count, 256, 0, blocks=Blocks(index.edges, 300))
    assert stream.get_indices(np.arange(256)).max() < count
    assert time.process_time() - began < 2


# ---- the order of blocks


@pytest.mark.parametrize("batch", [1, 3, 44, 256])
@pytest.mark.parametrize("pool", [1, 5, 12, 1000])
def test_each_sample_comes_once_an_epoch_wherever_one_begins(batch, pool):
    edges = [0]  # of blocks of 7 samples, which end where a shard does
    for count in COUNTS:
        end = edges[-1] + count
        edges += range(edges[-1] + 7, end, 7)
        edges.append(end)
    stream = Stream(349, batch, 3, blocks=Blocks(np.array(edges), pool))
    epochs = stream.get_indices(np.arange(3 * 349)).reshape(3, 349)
    assert (np.sort(epochs, 1) == np.arange(349)).all()
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    positions = np.random.default_rng(0).integers(0, 3 * 349, 50)
    assert np.array_equal(stream.get_indices(positions), epochs.reshape(-1)[positions])


def test_few_blocks_are_in_use_and_a_machine_reads_its_own():
    sizes = np.random.default_rng(0).integers(10, 30, 20_000)
    order = Blocks(np.cumsum([0] + sizes.tolist()), 256)
    count = int(sizes.sum())
    batch = 256
    chunks = np.split(np.arange(count), range(2**16, count, 2**16))
    samples = np.concatenate([order.permute(chunk, 0, 1, batch) for chunk in chunks])
    block = order.find(samples)
    first = np.full(len(sizes), count)
    last = np.zeros(len(sizes), np.int64)
    np.minimum.at(first, block, np.arange(count))
    np.maximum.at(last, block, np.arange(count))
    changes = np.bincount(first, minlength=count + 1) - np.bincount(last + 1, minlength=count + 1)
    assert np.cumsum(changes).max() <= 1.3 * 256
    assert abs(np.corrcoef(np.arange(count), samples)[0, 1]) < 3 / len(sizes) ** 0.5
    slots = (count + np.arange(count)) % batch
    for machines in (2, 3, 4, 5, 6):
        machine = slots * machines // batch
        num_reads = len(np.unique(machine * len(sizes) + block))
        assert num_reads < 1.05 * len(sizes), machines


# ---- blocks that processes share


class Changed:
    """A data set whose shard has changed."""

    def batches(self, limit: int) -> list[np.ndarray]:
        return [np.arange(limit)]

    def __getitems__(self, indices: np.ndarray):
        raise Refused("a.tar: byte 512: it has changed")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_changes_ends_the_run_in_one_line(workers, monkeypatch):
    batches = create_eval_loader(Changed(), 4, workers)
    for wait in (
        lambda: next(iter(batches)),
        lambda: next(Prefetcher(batches, torch.device("cpu"))),
    ):
        with pytest.raises(Refused) as changed:
            wait()
        assert str(changed.value) == "a.tar: byte 512: it has changed"
    children = list_data_workers()
    # Not those of other tests.
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    loader_workers.stop_workers()  # torch would wait for them


def test_a_block_that_is_refused_may_be_read_later():
    cache = open_blocks(2, room=100)
    for fetch, text in (
        (lambda _: [[b"x" * 200]], "its shard says at most 100"),
        (lambda _: ranges.read("/none.tar", 0, 1, ""), "none.tar"),
    ):
        with pytest.raises(Refused, match=text):
            cache.sample(1, 0, fetch)
    assert cache.sample(1, 1, lambda _: [[b"a", b"b"]]) == b"b"


def get_batch(stream: Stream, step: int) -> np.ndarray:
    """Indices of a step of 8 samples, in the first epoch."""
    return stream.get_indices(np.arange(min(349, step * 8), min(349, step * 8 + 8)))


def read_steps(source, stream: Stream, worker: int, together, files: list[bytes]) -> None:
    """Every third step of an epoch, as a data worker reads it."""
    for step in range(worker, 45, 3):
        together.wait(60)
        batch = get_batch(stream, step)
        source.prefetch(batch)
        source.prefetch(get_batch(stream, step + 3))
        for index in batch.tolist():
            assert source.get_content(index) == files[index]


@pytest.mark.parametrize("slots, max_reads", [(24, 1.1), (8, 1e9)])
def test_data_workers_read_a_block_hardly_more_than_once(
    files, server, monkeypatch, slots, max_reads
):
    monkeypatch.setattr(shard_index, "_BLOCK", 2**13)
    source = read(f"{server.url}/tars/train-{{000..002}}.tar", is_eval_only=True)[0]
    count = len(source.blocks.edges) - 1
    (source,) = share_blocks([source], slots * source.index.block_bytes / 2**20)
    assert count > 60 and source.cache.slots == slots and source.blocks.pool == slots // 3
    assert source.notes[-1].startswith("99% of neighbours in the shards have the same class")
    assert not shard_source._describe_order(np.random.default_rng(0).choice(2, 1000, p=[0.9, 0.1]))
    server.requests.clear()
    fork = multiprocessing.get_context("fork")
    stream = Stream(349, 8, 0, blocks=source.blocks)
    together = fork.Barrier(3)
    contents = [file.read_bytes() for file in list_class_images(files)]
    workers = []
    for i in range(3):
        args = (source, stream, i, together, contents)
        workers.append(fork.Process(target=read_steps, args=args))
        workers[i].start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    requests = [(path, headers["Range"]) for path, headers, _ in server.requests]
    assert len(set(requests)) == count and len(requests) <= max_reads * count


def test_blocks_that_are_missing_together_come_in_few_answers(files, server, monkeypatch):
    monkeypatch.setattr(shard_index, "_BLOCK", 2**13)
    source = read(f"{server.url}/tars/train-{{000..002}}.tar", is_eval_only=True)[0]
    (source,) = share_blocks([source], 64)
    server.requests.clear()
    source.prefetch(np.arange(349))
    contents = [file.read_bytes() for file in list_class_images(files)]
    subset = source.select(np.arange(3, 349, 7)).select(np.arange(2, 40))  # they share the cache
    assert read_contents(source) == contents
    assert read_contents(subset) == contents[17:283:7]
    assert len(source.blocks.edges) - 1 > 60 and len(server.requests) <= 3 + block_cache.IN_FLIGHT


def test_a_data_set_on_the_hub_is_read_where_it_lies(server, monkeypatch):
    """The Hub is not asked here: what `datasets` says about a data set is given, with its files on
    a server.
    """
    shards = [f"{server.url}/parquet/train-{i:03}.parquet" for i in range(3)]
    files = {datasets.Split.TRAIN: shards[1:], datasets.Split.TEST: shards[:1]}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: builder)
    train, val = read("owner/name", streaming=True, split="test")
    assert (len(train), len(val)) == (348, 1)
    assert (train.split_text, val.split_text) == ("the train shards", "the test shards")
    files[datasets.Split.TEST] = [f"{server.url}/parquet/test.csv"]
    message = read_refusal("owner/name", streaming=True)
    assert "not Parquet or tars; leave it out to download them" in message
    assert "is no name on the Hugging Face Hub" in read_refusal(server.url, streaming=True)
