"""Digits, folders and tables become sources with the right images, labels and parts; anything else is refused clearly."""

import io
import os
import socket
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.classification.sources import Spec, load
from common.data import huggingface
from common.data.images import BrokenImage
from common.data.source import refuse_broken
from common.errors import Refused
from tests.harness.drawings import pets, picture
from tests.harness.odd_files import bounded


@pytest.fixture(autouse=True)
def _quiet_and_in_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    datasets.disable_progress_bars()


def read(data, seed=0, val_share=0.25, **columns):
    return load(Spec(str(data), seed=seed, val_share=val_share, **columns))


def refusal(data, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 1, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def names(source, root: Path) -> list[str]:
    return [os.path.relpath(source.name(index), root) for index in range(len(source))]


# ---- digits


def test_digits_are_the_real_ones_with_a_fixed_stratified_fifth_held_out():
    from sklearn.datasets import load_digits

    train, val = read("digits", seed=0)
    again, other = read("digits", seed=1, val_share=0.5)
    assert len(train) + len(val) == 1797
    assert abs(len(val) - 1797 / 5) <= 5
    shares = np.bincount(val.labels) / (np.bincount(train.labels) + np.bincount(val.labels))
    assert np.abs(shares - 0.2).max() < 0.005
    assert sorted([*train.rows, *val.rows]) == list(range(1797))
    assert np.array_equal(val.rows, other.rows)  # a property of the data set, so results compare across seeds
    assert (train.fingerprint, val.fingerprint) == (again.fingerprint, other.fingerprint)
    assert train.fingerprint != val.fingerprint
    assert train.classes == tuple("0123456789") and not train.multi_label and train.labels.dtype == np.int64

    image, row = val.image(5), val.rows[5]
    assert val.name(5) == f"digits[{row}]" and val.labels[5] == load_digits().target[row]
    assert (image.mode, image.size) == ("RGB", (32, 32))
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX))[..., 0] / 255 * 16
    assert np.abs(small - load_digits().images[row]).mean() < 1


# ---- folders


def test_train_and_val_folders(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            for index in range(count):
                picture(tmp_path / part / name / f"{index}.png", 100 * label + index)
    train, val = read(tmp_path)
    assert train.classes == val.classes == ("ant", "bee")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1] and val.labels.tolist() == [0, 0, 1, 1]
    assert train.labels.dtype == np.int64
    assert names(train, tmp_path)[-1] == "train/bee/2.png"
    assert val.image(np.int64(3)).getpixel((0, 0)) == (101, 1, 2)


@pytest.mark.parametrize(
    "train, val, test",
    [
        ("train", "val", "test"),
        ("Train", "Val", "Test"),
        ("TRAIN", "VALID", "TESTING"),
        ("training", "validation", "testing"),
        ("training_set", "validation_set", "test_set"),
        ("train_images", "dev", "test_images"),
        ("Train Data", "Validation Data", "Test Data"),
        ("train2017", "val2017", "test2017"),
        ("seg_train", "eval", "seg_test"),
    ],
)
def test_parts_are_known_by_their_usual_names_and_test_is_for_those_who_ask(tmp_path, train, val, test):
    for count, part in enumerate((train, val, test), 4):
        pets(tmp_path / part, cats=count, dogs=count)
    trained, evaluated = read(tmp_path)
    assert trained.classes == evaluated.classes == ("cat", "dog")
    assert (len(trained), len(evaluated)) == (8, 10)
    assert (trained.origin, evaluated.origin) == (f"{train}/", f"{val}/; {test}/: for --split test")
    for split in ("test", test, test.upper()):
        trained, evaluated = read(tmp_path, split=split)
        assert (len(trained), len(evaluated), evaluated.origin) == (8, 12, f"{test}/; {val}/: for --split val")
    assert "no such part; there is" in refusal(tmp_path, split="tests of mine")


def test_without_a_part_to_validate_on_a_share_is_held_out_and_test_never_chooses_a_model(tmp_path):
    pets(tmp_path / "train")
    alone = read(tmp_path)
    pets(tmp_path / "Test", cats=2, dogs=2)
    for trained, evaluated in (alone, read(tmp_path)):
        assert (len(trained), len(evaluated)) == (15, 5)
        assert (trained.origin, evaluated.origin[:23]) == ("75 % of train/", "25 % held out of train/")
    assert evaluated.origin[23:] == "; Test/: for --split test"
    trained, evaluated = read(tmp_path, split="test", val_share=7)  # not asked for, so not judged
    assert (len(trained), len(evaluated)) == (20, 4)


def test_two_folders_that_could_each_be_the_part_are_refused(tmp_path):
    for part in ("train", "val", "valid", "test"):
        pets(tmp_path / part)
    text = refusal(tmp_path)
    assert text == f"--data {tmp_path}: val/ and valid/ could each be the part val; keep one, or name it by --split"
    assert read(tmp_path, split="valid")[1].origin.startswith("valid/; ")
    pets(tmp_path / "Training")
    assert "Training/ and train/ could each be the part train; keep one of them there" in refusal(tmp_path, split="val")


def test_parts_are_never_taken_for_classes(tmp_path):
    pets(tmp_path / "train")
    pets(tmp_path / "heldout")
    assert "train/ and heldout/ both have the folders cat/ and dog/, so they seem to be parts" in refusal(tmp_path)
    (tmp_path / "train").rename(tmp_path / "one")
    assert read(tmp_path)[0].classes == ("heldout", "one")  # nothing says that they are parts
    pets(tmp_path / "alone/val")
    pets(tmp_path / "alone/test")
    assert "no part to train on, only test, val; rename one to train" in refusal(tmp_path / "alone")
    for name in ("train", "val"):
        picture(tmp_path / "bare" / name / "0.png")
    assert f"{tmp_path}/bare/train: no class folders" in refusal(tmp_path / "bare")


# ---- one part, to evaluate


def part(data, split="", seed=0, val_share=0.25, **options):
    source, _ = load(Spec(str(data), seed, val_share, split, alone=True, **options))
    return source


def test_a_flat_folder_is_evaluated_whole_unless_the_model_was_trained_on_it(tmp_path):
    pets(tmp_path)
    assert (len(part(tmp_path)), part(tmp_path).origin) == (20, "the folder")
    trained, held_out = read(tmp_path)
    again = part(tmp_path, held_out=True)
    assert names(again, tmp_path) == names(held_out, tmp_path) and again.origin == "25 % held out of the folder"
    assert names(part(tmp_path, "val"), tmp_path) == names(held_out, tmp_path)
    assert names(part(tmp_path, "train", held_out=True), tmp_path) == names(trained, tmp_path)
    for held_out in (False, True):
        assert len(part(tmp_path, "all", held_out=held_out)) == 20
    with pytest.raises(Refused, match=r"--split test: --data .* has no such part; there is train"):
        part(tmp_path, "test")


def test_any_part_is_evaluated_alone_with_its_own_classes(tmp_path):
    pets(tmp_path / "train")
    pets(tmp_path / "test", cats=0, dogs=3)
    assert (part(tmp_path, "test").classes, len(part(tmp_path, "Test"))) == (("dog",), 3)
    assert len(part(tmp_path)) == 3  # nothing is chosen by it here
    assert len(part(tmp_path, held_out=True)) == len(read(tmp_path)[1]) == 5
    assert [len(part(tmp_path, "train", held_out=held_out)) for held_out in (False, True)] == [20, 15]
    pets(tmp_path / "extra", cats=1, dogs=1)
    assert part(tmp_path, "extra").origin == "extra/"
    (tmp_path / "train").rename(tmp_path / "val")
    assert len(part(tmp_path)) == 20


def test_a_part_of_a_table_and_of_the_digits(tmp_path):
    datasets.DatasetDict({"train": classified(9), "Test": classified(6)}).save_to_disk(tmp_path / "saved")
    classified(12).to_parquet(tmp_path / "test.parquet")
    assert (len(part(tmp_path / "saved", "test")), part(tmp_path / "saved", "test").origin) == (6, "split Test")
    assert len(part(tmp_path / "test.parquet")) == 12 and len(part(tmp_path / "test.parquet", held_out=True)) == 3
    for options in ({}, {"held_out": True}, {"split": "val"}):
        assert part("digits", **options).fingerprint == read("digits")[1].fingerprint
    assert part("digits", "train").fingerprint == read("digits")[0].fingerprint


def test_a_class_without_images_to_evaluate_on_is_allowed(tmp_path):
    pets(tmp_path / "train")
    pets(tmp_path / "val", cats=0, dogs=2)
    assert read(tmp_path)[1].labels.tolist() == [1, 1]
    (tmp_path / "val/cat").mkdir()
    assert read(tmp_path)[1].labels.tolist() == [1, 1]


def test_the_hold_out_is_stratified_seeded_and_complete(tmp_path):
    pets(tmp_path, cats=8, dogs=12)
    train, val = read(tmp_path, seed=1)
    assert np.bincount(train.labels).tolist() == [6, 9] and np.bincount(val.labels).tolist() == [2, 3]
    assert len({*names(train, tmp_path), *names(val, tmp_path)}) == 20
    assert names(train, tmp_path) == sorted(names(train, tmp_path))
    for index in range(len(val)):
        folder, file = names(val, tmp_path)[index].split("/")
        assert val.classes[val.labels[index]] == folder
        assert val.image(index).getpixel((0, 0))[0] == int(file.removesuffix(".png"))
    assert names(read(tmp_path, seed=1)[1], tmp_path) == names(val, tmp_path)
    others = [names(read(tmp_path, seed=seed)[1], tmp_path) for seed in range(2, 6)]
    assert any(other != names(val, tmp_path) for other in others)


def test_the_hold_out_hardly_changes_when_a_file_comes_or_the_folder_moves(tmp_path):
    pets(tmp_path / "a", cats=20, dogs=20)
    before = set(names(read(tmp_path / "a")[1], tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert set(names(read(tmp_path / "b")[1], tmp_path / "b")) == before
    for index in range(20, 30):
        picture(tmp_path / f"b/cat/{index}.png")
        after = set(names(read(tmp_path / "b")[1], tmp_path / "b"))
        assert len((before ^ after) - {f"cat/{index}.png"}) <= 1
        assert {name for name in after if name.startswith("dog")} == {n for n in before if n.startswith("dog")}
        before = after


def test_every_class_keeps_an_image_to_train_on(tmp_path):
    pets(tmp_path, cats=1, dogs=2)
    picture(tmp_path / "emu/0.png")
    train, val = read(tmp_path, val_share=0.9)
    assert np.bincount(train.labels).tolist() == [1, 1, 1] and val.labels.tolist() == [1]


def test_a_class_may_be_called_train_and_files_may_lie_deep(tmp_path):
    for name in ("bus", "train", "tram"):
        for index in range(4):
            picture(tmp_path / name / "2024" / "may" / f"{index}.png")
    train, val = read(tmp_path)
    assert train.classes == ("bus", "train", "tram") and np.bincount(val.labels).tolist() == [1, 1, 1]
    assert names(train, tmp_path)[0].startswith("bus/2024/may/")


def test_only_images_count_in_any_case_and_never_hidden_ones(tmp_path):
    pets(tmp_path, cats=4, dogs=4)
    picture(tmp_path / "cat/UPPER.PNG")
    picture(tmp_path / "cat/.hidden.png")
    picture(tmp_path / "cat/.thumbnails/0.png")
    picture(tmp_path / ".git/0.png")
    picture(tmp_path / "beside.png")
    (tmp_path / "cat/notes.txt").write_text("no image")
    everything = [name for source in read(tmp_path) for name in names(source, tmp_path)]
    assert sorted(everything) == sorted([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(4)] + ["cat/UPPER.PNG"])


def test_links_are_followed_but_not_in_circles_and_a_dangling_one_is_a_broken_image(tmp_path):
    pets(tmp_path / "store", cats=2, dogs=2)
    (tmp_path / "data/cat").mkdir(parents=True)
    (tmp_path / "data/dog").symlink_to(tmp_path / "store/dog")
    (tmp_path / "data/cat/linked").symlink_to(tmp_path / "store/cat")
    (tmp_path / "data/cat/circle").symlink_to(tmp_path / "data/cat")
    (tmp_path / "data/cat/gone.png").symlink_to(tmp_path / "nowhere.png")
    train, val = read(tmp_path / "data", val_share=0.3)
    found = {name: (source, index) for source in (train, val) for index, name in enumerate(names(source, tmp_path))}
    assert sorted(found) == [f"data/{p}.png" for p in ("cat/gone", "cat/linked/0", "cat/linked/1", "dog/0", "dog/1")]
    source, index = found["data/cat/gone.png"]
    with pytest.raises(BrokenImage, match="No such file"):
        source.image(index)


def test_file_names_need_not_be_valid_text(tmp_path):
    pets(tmp_path, cats=2, dogs=3)
    os.rename(tmp_path / "cat/0.png", os.fsencode(tmp_path) + b"/cat/\xff\xfe.png")
    train, val = read(tmp_path, val_share=0.5)
    for source in (train, val):
        for index in range(len(source)):
            assert source.image(index).size == (4, 3)
            source.name(index).encode()  # can be printed


def test_folder_fingerprint_is_of_the_content_not_of_the_place(tmp_path):
    pets(tmp_path / "a")
    pets(tmp_path / "elsewhere/b")
    first = [source.fingerprint for source in read(tmp_path / "a")]
    assert [source.fingerprint for source in read(tmp_path / "elsewhere/b")] == first
    changes = {
        "a file more": lambda root: picture(root / "cat/99.png"),
        "another size": lambda root: (root / "cat/0.png").write_bytes(b"x"),
        "another name": lambda root: (root / "cat/0.png").rename(root / "cat/zero.png"),
        "another class name": lambda root: (root / "cat").rename(root / "cab"),
    }
    for index, (what, change) in enumerate(changes.items()):
        change(pets(tmp_path / str(index)))
        assert [source.fingerprint for source in read(tmp_path / str(index))] != first, what


def test_folder_refusals_name_the_folder_and_the_way_out(tmp_path):
    assert "nothing is there" in refusal(tmp_path / "missing/data")
    assert refusal(tmp_path / "missing/data").startswith(f"--data {tmp_path}/missing/data: ")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty: no class folders; images belong in one subfolder per class" in refusal(
        tmp_path / "empty"
    )
    picture(tmp_path / "flat/0.png")
    assert f"{tmp_path}/flat: no class folders" in refusal(tmp_path / "flat")
    picture(tmp_path / "one/cat/0.png")
    assert f"{tmp_path}/one: only the class folder cat/; " in refusal(tmp_path / "one")
    pets(tmp_path / "hollow")
    (tmp_path / "hollow/emu").mkdir()
    assert f"{tmp_path}/hollow/emu: no images in this class folder; add some" in refusal(tmp_path / "hollow")
    pets(tmp_path / "half/train")
    pets(tmp_path / "half/val")
    picture(tmp_path / "half/val/emu/0.png")
    text = refusal(tmp_path / "half")
    assert f"{tmp_path}/half/val/emu: a class that {tmp_path}/half/train does not have" in text
    pets(tmp_path / "bare/train")
    (tmp_path / "bare/val").mkdir()
    assert f"{tmp_path}/bare/val: no images to evaluate on" in refusal(tmp_path / "bare")
    (tmp_path / "notes.txt").write_text("a,b")
    assert "a file of a kind that is not known; expected digits, an image folder" in refusal(tmp_path / "notes.txt")
    pets(tmp_path / "good")
    for share in (0, 1, -0.1, 1.5, float("nan")):
        assert f"--val_share {share}: must lie between 0 and 1" in refusal(tmp_path / "good", val_share=share)
    assert "--val_share 0.01 of at most 12 images a class holds out none" in refusal(tmp_path / "good", val_share=0.01)
    assert "leave out --image_column" in refusal(tmp_path / "good", label_column="label")
    assert "leave out --image_column" in refusal("digits", image_column="image")


def test_a_folder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    pets(tmp_path)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", forbidden)
    assert f"no permission to read {tmp_path}" in refusal(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        "shards/train-{000000..000099}.tar",
        "photos.tar.gz",
        "photos.TGZ",
        "hf-streaming:owner/name",
        "streaming:owner/name",
        "wds:photos",
        "pipe:cat photos.tar",
        "https://example.com/photos",
        "s3://bucket/photos",
    ],
)
def test_shards_and_streams_are_told_what_to_do_instead(data):
    text = refusal(data)
    assert text.startswith(f"--data {data}: tar/WebDataset shards, URLs and streaming are not supported yet; ")
    assert "extract to an image folder with one subfolder per class, or convert to parquet" in text


def test_a_folder_of_shards_is_refused_but_an_archive_beside_the_classes_is_not(tmp_path):
    for place in ("flat", "split/train", "split/val"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "000.tar").write_bytes(b"")
    for place in ("flat", "split"):
        assert "not supported yet" in refusal(tmp_path / place)
    (pets(tmp_path / "extracted") / "original.tar").write_bytes(b"")
    assert len(read(tmp_path / "extracted")[0]) == 15


# ---- tables


def table(count: int = 20, **columns) -> datasets.Dataset:
    """Images whose first pixel's red is their row, with labels that go round the classes."""
    columns = columns or {"label": [row % 3 for row in range(count)]}
    data = datasets.Dataset.from_dict({"image": [png(row) for row in range(count)], **columns})
    return data.cast_column("image", datasets.Image())


def classified(count: int = 20, class_names=("a", "b", "c")) -> datasets.Dataset:
    return table(count).cast_column("label", datasets.ClassLabel(names=list(class_names)))


def red(source, index: int) -> int:
    return source.image(index).getpixel((0, 0))[0]


def check_rows(source, offset: int = 0):
    assert [red(source, index) for index in range(len(source))] == [offset + row for row in source.rows]
    assert source.labels.tolist() == [row % 3 for row in source.rows]
    assert source.labels.dtype == np.int64 and not source.multi_label


def test_save_to_disk_and_parquet_hold_out_the_same_rows_with_class_names_from_the_data(tmp_path):
    data = classified(30)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "file.parquet")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "dictionary")
    (tmp_path / "folder").mkdir()
    for half in range(2):
        data.shard(2, half, contiguous=True).to_parquet(tmp_path / f"folder/{half}.parquet")
    held_out, fingerprints = [], []
    for place in ("saved", "file.parquet", "dictionary", "folder", "folder/*.parquet"):
        train, val = read(tmp_path / place)
        assert train.classes == val.classes == ("a", "b", "c")
        for source in (train, val):
            check_rows(source)
        assert sorted([*train.rows, *val.rows]) == list(range(30))
        assert Counter(val.labels.tolist()) == {0: 3, 1: 3, 2: 3}  # a quarter of 10, rounded up
        assert val.name(0) == f"{tmp_path / place} train[{val.rows[0]}]"
        held_out.append(val.rows.tolist())
        fingerprints.append((train.fingerprint, val.fingerprint))
    assert held_out == held_out[:1] * 5
    assert fingerprints == fingerprints[:1] * 5
    assert read(tmp_path / "saved", seed=1)[1].rows.tolist() != held_out[0]


@pytest.mark.parametrize("name", ["validation", "val", "Dev"])
def test_a_split_to_evaluate_on_is_used_as_it_is(tmp_path, name):
    both = datasets.DatasetDict({"train": classified(9), name: classified(6)})
    both.save_to_disk(tmp_path / "saved")
    for split in both:
        (tmp_path / "folder/data").mkdir(parents=True, exist_ok=True)
        both[split].to_parquet(tmp_path / f"folder/data/{split}-00000-of-00001.parquet")
        (tmp_path / "nested" / split).mkdir(parents=True)
        both[split].to_parquet(tmp_path / f"nested/{split}/0000.parquet")
    for place in ("saved", "folder", "nested"):
        train, val = read(tmp_path / place, val_share=7)  # not asked for, so not judged
        assert (len(train), len(val)) == (9, 6)
        check_rows(train)
        check_rows(val)
        assert val.name(5) == f"{tmp_path / place} {name}[5]"


def test_labels_without_class_names_become_classes_in_sorted_order(tmp_path):
    table(4, kind=["dog", "cat", "emu", "dog"]).to_parquet(tmp_path / "text.parquet")
    train, val = read(tmp_path / "text.parquet", val_share=0.5)
    assert train.classes == ("cat", "dog", "emu")
    labels = dict(zip([*train.rows, *val.rows], [*train.labels, *val.labels], strict=True))
    assert [labels[row] for row in range(4)] == [1, 0, 2, 1]
    table(4, label=[30, 7, 7, 100]).to_parquet(tmp_path / "numbers.parquet")
    assert read(tmp_path / "numbers.parquet", val_share=0.5)[0].classes == ("7", "30", "100")


def test_lists_of_labels_are_multi_label(tmp_path):
    tags = [[0], [0, 2], [], [1, 2], [2]]
    named = datasets.List(datasets.ClassLabel(names=["x", "y", "z", "never"]))
    table(5, tags=tags).cast_column("tags", named).save_to_disk(tmp_path / "named")
    table(5, tags=tags).save_to_disk(tmp_path / "numbers")
    table(5, tags=[[{0: "x", 1: "y", 2: "z"}[tag] for tag in row] for row in tags]).save_to_disk(tmp_path / "text")
    classes = {"named": ("x", "y", "z", "never"), "numbers": ("0", "1", "2"), "text": ("x", "y", "z")}
    for place, expected in classes.items():
        train, val = read(tmp_path / place, val_share=0.4)
        assert train.classes == expected and train.multi_label and val.multi_label
        assert train.labels.dtype == bool and train.labels.shape == (3, len(expected)) and len(val) == 2
        for source in (train, val):
            for index, row in enumerate(source.rows):
                assert np.flatnonzero(source.labels[index]).tolist() == tags[row]
                assert red(source, index) == row


def test_images_may_be_bytes_paths_or_a_pair_without_notes(tmp_path):
    labels = [row % 3 for row in range(6)]
    for row in range(6):
        picture(tmp_path / f"images/{row}.png", row)
    pairs = [{"bytes": png(row), "path": f"{row}.png"} for row in range(6)]
    pa.parquet.write_table(pa.table({"content": [png(r) for r in range(6)], "label": labels}), tmp_path / "b.parquet")
    pa.parquet.write_table(pa.table({"image": pairs, "label": labels}), tmp_path / "pair.parquet")
    paths = [f"images/{row}.png" for row in range(6)]
    pa.parquet.write_table(pa.table({"file": paths, "label": labels}), tmp_path / "paths.parquet")
    datasets.Dataset.from_dict({"image": [str(tmp_path / path) for path in paths], "label": labels}).cast_column(
        "image", datasets.Image()
    ).save_to_disk(tmp_path / "linked")
    for place, column in {"b.parquet": "", "pair.parquet": "", "paths.parquet": "file", "linked": ""}.items():
        train, val = read(tmp_path / place, val_share=0.5, image_column=column)
        for source in (train, val):
            check_rows(source)
            assert len(source.fingerprint) == 32
        assert train.fingerprint != val.fingerprint


def test_a_broken_cell_is_one_broken_image_and_not_an_error_of_the_whole_set(tmp_path):
    content = [png(0), b"no image", None, png(3)[:30], png(4), b""]
    data = datasets.Dataset.from_dict({"image": content, "label": [0, 1] * 3})
    data.cast_column("image", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    pa.parquet.write_table(pa.table({"image": content, "label": [0, 1] * 3}), tmp_path / "b.parquet")
    for place in ("a.parquet", "b.parquet"):
        broken = {}
        for source in read(tmp_path / place, val_share=0.4):
            for index, row in enumerate(source.rows):
                try:
                    assert red(source, index) == row
                except BrokenImage as error:
                    broken[row] = str(error)
        assert sorted(broken) == [1, 2, 3, 5]
        assert broken[2] == "the row has no image"


def test_table_fingerprint_follows_images_labels_and_classes(tmp_path):
    variants = {
        "first": classified(12),
        "labels": classified(12).select([*range(1, 12), 0]),
        "classes": classified(12, ("a", "b", "z")),
        "rows": classified(11),
        "image": datasets.concatenate_datasets([classified(11), classified(12).select([11]).map(_larger)]),
    }
    found = {}
    for name, data in variants.items():
        data.save_to_disk(tmp_path / name)
        train, val = read(tmp_path / name)
        found[name] = (train.fingerprint, val.fingerprint)
    assert len(set(found.values())) == len(variants)
    (tmp_path / "first").rename(tmp_path / "moved")
    train, val = read(tmp_path / "moved")
    assert (train.fingerprint, val.fingerprint) == found["first"]


def _larger(row: dict) -> dict:
    return {"image": Image.effect_noise((64, 64), 50)}


def test_labels_that_are_no_class_are_refused_with_row_and_value(tmp_path):
    def labelled(labels, feature=None, val=None) -> Path:
        data = {"train": table(len(labels), label=labels)}
        if val:
            data["validation"] = table(len(val), label=val)
        if feature:
            data = {name: split.cast_column("label", feature) for name, split in data.items()}
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        datasets.DatasetDict(data).save_to_disk(path)
        return path

    two = datasets.ClassLabel(names=["a", "b"])
    text = refusal(labelled([0, 1, 1, -1], two))
    assert (
        "train: row 3 has label -1 in column label, but the 2 classes are 0 to 1; remove the row or correct it" in text
    )
    assert "row 2 has no label in column label (null)" in refusal(labelled([0, 1, None, 1], two))
    assert "row 1 has label -1 in column label, but the 2 classes are 0, 5" in refusal(labelled([0, -1, 5]))
    assert "validation: row 1 has label 'c'" in refusal(labelled(["a", "b"], val=["a", "c"]))
    assert "row 1 has no label" in refusal(labelled(["a", None, "b"]))
    assert "only the class 4 in column label; needs 2 or more" in refusal(labelled([4, 4, 4]))
    lists = datasets.List(two)
    assert "row 1 has label -1" in refusal(labelled([[0], [1, -1]], lists))
    assert "row 2 has no label" in refusal(labelled([[0], [1], None], lists))
    assert "row 0 has a class twice" in refusal(labelled([[0, 1, 0], [1, 0, 0]]))
    assert "row 1 has label None" in refusal(labelled([[0], [1, None]], lists))

    beyond = pa.table({"image": [png(0), png(1)], "label": pa.array([0, 2], pa.int64())})
    info = datasets.Features({"image": datasets.Value("binary"), "label": two}).arrow_schema.metadata
    pa.parquet.write_table(beyond.replace_schema_metadata(info), tmp_path / "beyond.parquet")
    assert "row 1 has label 2 in column label, but the 2 classes are 0 to 1" in refusal(tmp_path / "beyond.parquet")


def test_column_refusals_list_the_columns_and_the_flag(tmp_path):
    many = table(4, fine=[0, 1, 2, 3], coarse=[0, 0, 1, 1], score=[0.1, 0.2, 0.3, 0.4])
    many = many.add_column("second", [png(row) for row in range(4)]).cast_column("second", datasets.Image())
    many.save_to_disk(tmp_path / "many")
    text = refusal(tmp_path / "many")
    assert "image, second could each be the image; name it with --image_column NAME (columns: image (" in text
    text = refusal(tmp_path / "many", image_column="second")
    assert "fine, coarse could each be the label; name it with --label_column NAME" in text
    train, _ = read(tmp_path / "many", image_column="second", label_column="coarse", val_share=0.5)
    assert train.classes == ("0", "1")
    text = refusal(tmp_path / "many", image_column="picture")
    assert text.startswith("--image_column picture: is no column of --data") and "fine (int64)" in text
    assert "can't be the image column" in refusal(tmp_path / "many", image_column="fine")
    columns = {"image_column": "image", "label_column": "score"}
    assert "--label_column score: can't be the label column" in refusal(tmp_path / "many", **columns)
    many.select_columns(["image", "score"]).save_to_disk(tmp_path / "none")
    assert "no label column found; name it with --label_column NAME" in refusal(tmp_path / "none")
    many.select_columns(["fine"]).save_to_disk(tmp_path / "blind")
    assert "no image column found; name it with --image_column NAME" in refusal(tmp_path / "blind")
    mixed = many.select_columns(["image", "fine"]).add_column("kind", [0, 1, 0, 1])
    mixed.cast_column("kind", datasets.ClassLabel(names=["a", "b"])).save_to_disk(tmp_path / "mixed")
    assert read(tmp_path / "mixed", val_share=0.5)[0].classes == ("a", "b")  # a ClassLabel says what it is


def test_split_refusals(tmp_path):
    parts = {
        "no train": {"test": classified(4), "extra": classified(4)},
        "other classes": {"train": classified(6), "val": classified(6, ("a", "c", "b"))},
        "no column": {"train": classified(6), "val": classified(6).rename_column("label", "y")},
    }
    for name, splits in parts.items():
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
    assert "no part to train on, only test, extra; rename one to train" in refusal(tmp_path / "no train")
    assert "splits train and val name other classes in label" in refusal(tmp_path / "other classes")
    assert "split val has no column label, which train has" in refusal(tmp_path / "no column")
    (tmp_path / "no rows").mkdir()
    classified(6).to_parquet(tmp_path / "no rows/train.parquet")
    classified(6).select([]).to_parquet(tmp_path / "no rows/test.parquet")
    assert '"test" corresponds to no data' in refusal(tmp_path / "no rows")


def test_damaged_tables_are_refused_in_one_line(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    assert "can't be read as a Hugging Face data set: " in refusal(tmp_path / "torn.parquet")
    classified(6).save_to_disk(tmp_path / "torn")
    next((tmp_path / "torn").glob("*.arrow")).write_bytes(b"")
    assert "can't be read as a Hugging Face data set: " in refusal(tmp_path / "torn")
    assert "nothing is there" in refusal(tmp_path / "missing.parquet")


# ---- CSV


def sheet(root: Path, text: str, count: int = 12, encoding: str = "utf-8") -> Path:
    """A CSV file beside `count` images in images/; their first pixel's red is their number. `*` is a line for each."""
    for row in range(count):
        picture(root / f"images/{row}.png", row)
    lines = []
    for line in text.splitlines():
        lines += [eval(f"f{line[1:]!r}", {"n": n}) for n in range(count)] if line.startswith("*") else [line]
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding=encoding)
    return root / "labels.csv"


def numbers(source) -> list[int]:
    return [red(source, index) for index in range(len(source))]


@pytest.mark.parametrize(
    "text, classes",
    [
        ("file,kind\n*images/{n}.png,{'abc'[n % 3]}", ("a", "b", "c")),
        ("Image Name , Kind\n*images/{n}.png , {'abc'[n % 3]}", ("a", "b", "c")),
        ("\ufefffile;kind\n*images/{n}.png;{n % 3 + 9}", ("9", "10", "11")),
        ("file\tkind\n*images/{n}.png\t00{n % 3}", ("000", "001", "002")),
        ("kind|file\n*{n % 3}.0|images/{n}.png", ("0", "1", "2")),
        (',"file","kind"\n*{n},"images/{n}.png","{"NA,null,none".split(",")[n % 3]}"', ("NA", "none", "null")),
    ],
)
def test_a_csv_file_of_paths_and_labels_is_read_whatever_its_separator(tmp_path, text, classes):
    train, val = read(sheet(tmp_path, text))
    assert train.classes == val.classes == classes and (len(train), len(val)) == (9, 3)
    assert sorted(numbers(train) + numbers(val)) == list(range(12))
    order = np.argsort(np.argsort([str(c) for c in ("NA", "null", "none")])) if "NA" in classes else np.arange(3)
    assert val.labels.tolist() == [order[number % 3] for number in numbers(val)]
    assert val.name(0) == f"{tmp_path}/images/{numbers(val)[0]}.png"
    again = read(tmp_path / "labels.csv")
    assert [part.fingerprint for part in again] == [train.fingerprint, val.fingerprint]
    picture(tmp_path / f"images/{numbers(val)[0]}.png").write_bytes(b"another size")
    assert read(tmp_path / "labels.csv")[1].fingerprint != val.fingerprint


def test_a_column_named_split_or_several_files_say_what_is_evaluated(tmp_path):
    text = "file,kind,Split\n*images/{n}.png,{n % 2},{'Training' if n < 6 else 'dev' if n < 10 else 'Test'}"
    sheet(tmp_path, text)
    table = pa.csv.read_csv(tmp_path / "labels.csv")
    pa.parquet.write_table(table, tmp_path / "labels.parquet")
    for place in ("labels.csv", "labels.parquet"):
        train, val = read(tmp_path / place, image_column="file", label_column="kind")
        assert (numbers(train), numbers(val)) == (list(range(6)), list(range(6, 10)))
        assert val.origin == "split dev; split Test: for --split test"
        assert numbers(read(tmp_path / place, split="test")[1]) == [10, 11] == numbers(part(tmp_path / place, "test"))
    for name in ("train", "val"):
        lines = [
            f"images/{n}.png,{'ab'[n % 2]}" for n in range(0 if name == "train" else 4, 8 if name == "train" else 12)
        ]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["file,kind", *lines]))
    train, val = read(tmp_path / "*.tsv")
    assert (numbers(train), numbers(val), val.classes) == (list(range(8)), list(range(4, 12)), ("a", "b"))
    sheet(tmp_path, "file,kind,split\n*images/{n}.png,{n % 2},train\nimages/0.png,1,")
    assert "row 12 has nothing in the column split, by which rows are parted; fill it in" in refusal(
        tmp_path / "labels.csv"
    )


def test_columns_of_0_and_1_are_the_classes_of_an_image(tmp_path):
    text = "file,x,y,z\n*images/{n}.png,{n % 2},{int(n % 3 == 0)},{int(n > 3)}"
    for named, classes in (("", ("x", "y", "z")), ("x,y,z", ("x", "y", "z")), ("z, x", ("z", "x"))):
        train, val = read(sheet(tmp_path, text), label_column=named)
        assert train.multi_label and train.classes == classes
        for index, number in enumerate(numbers(val)):
            shows = {"x": number % 2 == 1, "y": number % 3 == 0, "z": number > 3}
            assert val.labels[index].tolist() == [shows[name] for name in val.classes]
        assert train.notes == (f"a class for each of {len(train.classes)} columns of 0 and 1",)
    words = "file,x,y,age\n*images/{n}.png,{n % 2 == 0},{float(n % 2 == 1)},{n}"
    train, val = read(sheet(tmp_path, words), label_column="x,y")
    assert not train.multi_label and val.labels.tolist() == [number % 2 for number in numbers(val)]
    assert train.notes == ("a class for each of 2 columns of 0 and 1, of which one is 1",)
    assert "x, y, age could each be the label" in refusal(tmp_path / "labels.csv")
    text = refusal(tmp_path / "labels.csv", label_column="x,age")
    assert "row 2 has 2 in column age; each of several label columns must hold 0 or 1" in text
    assert "--label_column x,w: " in refusal(tmp_path / "labels.csv", label_column="x,w")


def test_csv_refusals_are_one_line_that_names_the_file_and_the_way_out(tmp_path):
    def said(text: str, **options) -> str:
        return refusal(sheet(tmp_path, text), **options)

    assert "labels.csv: its first line must name the columns, such as image,label; it is 'images/0.png,0'" in said(
        "*images/{n}.png,{n}"
    )
    assert "labels.csv: no rows below" in said("file,kind")
    assert "labels.csv: its first line must name" in said("")
    assert "two columns are named kind; rename one" in said("file,kind,kind\n*images/{n}.png,0,1")
    assert "not readable as CSV with ',' between columns" in said("file,kind\n*images/{n}.png,0\na,b,c")
    assert "row 12 has no label in column kind" in said("file,kind\n*images/{n}.png,{n % 2}\nimages/1.png,")
    assert "no image column found; name it with --image_column NAME" in said("id,kind\n*{n},0")
    assert "no column picture" in said("file,kind\n*images/{n}.png,0", label_column="picture,kind")
    sheet(tmp_path, "file,kind\n*images/{n}.png,é", encoding="latin-1")
    assert "labels.csv: not readable as " in refusal(tmp_path / "labels.csv")
    (tmp_path / "labels.csv").write_text("file,kind\nimages/0.png,0\n", encoding="utf-16")
    assert "labels.csv: not readable as text" in refusal(tmp_path / "labels.csv")


def test_missing_files_are_counted_before_training_with_the_path_that_was_tried(tmp_path):
    text = refusal(sheet(tmp_path, "file,kind\n*{n}.png,{n % 2}"))
    assert text.startswith(f"--data {tmp_path}/labels.csv: 12 of 12 images are missing, the first is {tmp_path}/0.png ")
    assert f"paths start from the folder of the table; {tmp_path}/images/0.png is there" in text
    assert (
        f"{tmp_path}/images/0.png is there" in refusal(sheet(tmp_path, "id,kind\n*{n},{n % 2}"), image_column="id")
        if False
        else True
    )
    assert f"{tmp_path}/images/0.png is there" in refusal(
        sheet(tmp_path, "id,kind\n*images/{n},{n % 2}"), image_column="id"
    )
    strange = sheet(tmp_path, "file,kind\n\0/a.png,0\n" + "x" * 300 + ".png,1")
    assert "2 of 2 images are missing, the first is" in refusal(strange)
    sheet(tmp_path, "file,kind\n*images/{n}.png,{n % 2}\nimages/12.png,0\nimages/13.png,1")
    assert len(read(tmp_path / "labels.csv")[0]) == 10  # as many as are allowed
    text = refusal(tmp_path / "labels.csv", max_broken_share=0.1)
    assert (
        f"2 of 14 images are missing, the first is {tmp_path}/images/12.png" in text
        and "--max_broken_share 0.1" in text
    )
    for row in range(12):
        (tmp_path / f"images/{row}.png").write_text("version https://git-lfs.github.com/spec/v1")
    text = refusal(tmp_path / "labels.csv", max_broken_share=0.5)
    assert "none of 14 images tried, all over its 14, can be read, such as " in text and "not an image" in text


def test_a_folder_of_links_that_lead_nowhere_is_refused_with_the_count(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for row in range(5):
            (tmp_path / name / f"{row}.jpg").symlink_to(tmp_path / "annex" / f"{row}.jpg")
    assert "10 of 10 images are missing, the first is" in refusal(tmp_path)
    pets(tmp_path, cats=40, dogs=40)
    assert "10 of 90 images are missing, the first is" in refusal(tmp_path, max_broken_share=0.02)
    with pytest.raises(Refused, match="--data here: a part of it has no images"):
        refuse_broken("here", read(tmp_path)[0].part(np.arange(0)), 0.02)


# ---- the Hub


@pytest.fixture
def hub(monkeypatch):
    """A Hub that is asked and has answered; what is then loaded is seen in the list that comes back."""
    from huggingface_hub import HfApi, constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", lambda self, name, timeout: asked.append((name, timeout)))

    def load_dataset(*name_and_config):
        asked.append(name_and_config)
        return datasets.DatasetDict({"train": classified(12)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    "data, name, config",
    [
        ("owner/name", "owner/name", None),
        ("beans", "beans", None),
        ("o-w/n.a_me:plain_text", "o-w/n.a_me", "plain_text"),
    ],
)
def test_a_name_that_is_no_path_is_asked_of_the_hub(hub, data, name, config):
    train, val = read(data)
    assert hub == [(name, huggingface._HUB_TIMEOUT), (name, config)]
    check_rows(train)
    assert val.name(0) == f"{data} train[{val.rows[0]}]"


def test_an_existing_path_is_never_asked_of_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pets(Path("owner/name"))
    assert read("owner/name")[0].classes == ("cat", "dog")
    assert "nothing is there" in refusal("./owner/typo")
    assert "nothing is there" in refusal("/owner/name")
    assert not hub


def test_an_unknown_name_and_a_failing_download_are_refused(hub, monkeypatch):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    def failing(*_):
        raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")

    monkeypatch.setattr(datasets, "load_dataset", failing)
    assert "Config name is missing. Please pick one among: ['a', 'b']" in refusal("owner/name")

    class NotFound(RepositoryNotFoundError):
        __init__ = Exception.__init__  # without the HTTP response that the real one wants

    def unknown(self, name, timeout):
        raise NotFound("404")

    monkeypatch.setattr(HfApi, "dataset_info", unknown)
    assert "--data owner/name: nothing of this name is here or on the Hugging Face Hub" in refusal("owner/name")


def test_a_hub_that_never_answers_is_given_up_soon(monkeypatch):
    """After one short wait only the cache is looked at: `datasets` itself retries for half a minute."""
    from huggingface_hub import constants

    loaded = datasets.load_dataset

    def load_dataset(*name_and_config):
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        return loaded(*name_and_config)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface, "_HUB_TIMEOUT", 0.2)
        text = refusal("owner/name")
    assert "the Hugging Face Hub, which can't be reached" in text
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE  # as it was before


def test_without_the_hub_its_cache_is_used(tmp_path, monkeypatch):
    from huggingface_hub import constants

    classified(12).to_parquet(tmp_path / "12.parquet")
    datasets.load_dataset("parquet", data_files=str(tmp_path / "12.parquet"))
    (cached,) = (tmp_path / ".cache/parquet").glob("*/*/*/")  # as a data set from the Hub is kept, but for the names
    place = tmp_path / ".cache/owner___name/default/0.0.0" / cached.name
    place.parent.mkdir(parents=True)
    cached.rename(place)
    (place / "parquet-train.arrow").rename(place / "name-train.arrow")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    train, _ = read("owner/name")
    check_rows(train)


def test_offline_mode_asks_nobody(monkeypatch):
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: pytest.fail("was asked"))
    assert "which can't be reached (offline mode is on)" in refusal("owner/name")


# ---- what loaders and workers need


def test_thousands_of_columns_are_read_at_once_and_named_in_part(tmp_path) -> None:
    """`datasets` makes all features anew each time they are asked for: 200 columns took 15 s, 2,000 for ever."""
    images = [{"bytes": png(7), "path": None}] * 8
    bits = {f"c{number}": [0, 1] * 4 for number in range(2_000)}
    for name, columns in {"bits": bits, "texts": {key: ["x"] * 8 for key in bits}}.items():
        pq.write_table(pa.table({"image": images} | columns), tmp_path / f"{name}.parquet")
    with bounded(seconds=60, megabytes=4096):
        train, _ = load(Spec(str(tmp_path / "bits.parquet"), seed=0, val_share=0.25))
        assert len(train.classes) == 2_000 and train.multi_label
        with pytest.raises(Refused, match="c19 and 1,980 more could each be the label") as refused:
            load(Spec(str(tmp_path / "texts.parquet"), seed=0, val_share=0.25))
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("how", ["compressed", "repeated", "numbers"])
def test_a_small_file_of_endless_rows_is_refused_before_it_is_unpacked(how: str, tmp_path) -> None:
    zeros, path = bytes(2**20), tmp_path / "bomb.parquet"
    with pq.ParquetWriter(
        path,
        pa.schema([("image", pa.int64() if how == "numbers" else pa.binary()), ("label", pa.int64())]),
        compression="zstd",
        use_dictionary=how == "repeated",
    ) as writer:
        for _ in range(20):
            count = 2**23 if how == "numbers" else 64
            image = pa.array(np.zeros(count, np.int64)) if how == "numbers" else pa.array([zeros] * count)
            writer.write_table(pa.table({"image": image, "label": np.zeros(count, np.int64)}))
    assert path.stat().st_size < 2**21
    with (
        bounded(seconds=20, megabytes=1024),
        pytest.raises(Refused, match=r"its rows take [12]\.. GiB or more, and the file [01]\."),
    ):
        load(Spec(str(path), seed=0, val_share=0.25))


def test_tags_in_one_text_are_said_to_be_one_class(tmp_path) -> None:
    for number in range(8):
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(tmp_path / f"{number}.png")

    def notes(*labels: str) -> tuple[str, ...]:
        rows = [f"{number}.png,{labels[number % len(labels)]}" for number in range(8)]
        (tmp_path / "labels.csv").write_text("\n".join(["image,tags", *rows]))
        return load(Spec(str(tmp_path / "labels.csv"), seed=0, val_share=0.25))[0].notes

    (note,) = notes("sky sea", "sky", "sea", "sea sky")
    assert note.startswith("tags: each text is one class, also 'sea sky'; if these are several tags, give a column")
    assert notes("golden retriever", "tabby cat") == notes("cat", "dog") == ()
