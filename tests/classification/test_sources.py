"""Digits, folders and tables become sources with the right images, labels and parts."""

import hashlib
import io
import json
import os
import shutil
import unicodedata
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.classification.sources import Spec, load
from common.data.data_spec import is_fingerprint, join_fingerprints
from common.data.images import BrokenImage
from common.data.splits import get_split_kind, group_by_split
from common.errors import Refused
from tests.harness.drawings import draw_pets, draw_picture, draw_tree
from tests.harness.odd_files import bounded

datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def _in_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")


def read(data, seed=0, val_share=0.25, **options):
    return load(Spec(str(data), seed, val_share, **options))


def read_split(data, split="", **options):
    return read(data, split=split, is_eval_only=True, **options)[1]


def refusal(data, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def names(source, root: Path) -> list[str]:
    return [os.path.relpath(source.get_name(index), root) for index in range(len(source))]


def reds(source) -> list[int]:
    return [source.load_image(index).getpixel((0, 0))[0] for index in range(len(source))]


def test_a_fixed_stratified_fifth_of_the_digits_is_held_out():
    from sklearn.datasets import load_digits

    train, val = read("digits", seed=0)
    shares = np.bincount(val.labels) / (np.bincount(train.labels) + np.bincount(val.labels))
    assert np.abs(shares - 0.2).max() < 0.005
    assert sorted(np.append(train.rows, val.rows)) == list(range(1797))
    assert train.classes == tuple("0123456789")
    assert not train.multi_label
    image = val.load_image(5)
    row = val.rows[5]
    assert val.get_name(5) == f"digits[{row}]"
    assert val.labels[5] == load_digits().target[row]
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX))[..., 0] / 255 * 16
    assert image.mode == "RGB"
    assert np.abs(small - load_digits().images[row]).mean() < 1
    # Results compare across seeds.
    _, with_another_seed = read("digits", seed=1, val_share=0.5)
    held_out = read_split("digits", is_training_data=True)
    assert train.fingerprint != val.fingerprint
    assert val.fingerprint == with_another_seed.fingerprint == held_out.fingerprint
    assert read_split("digits", "train").fingerprint == train.fingerprint


# ---- folders

FLAT = {"cat": 8, "dog": 12}
SPLIT = {"train/cat": 8, "train/dog": 12, "Val/cat": 2, "Val/dog": 3, "test/dog": 1}
NO_VAL = {"train/cat": 8, "train/dog": 12, "Test/cat": 2, "Test/dog": 2}
TWO_VAL = {
    "train/cat": 8,
    "train/dog": 12,
    "val/cat": 1,
    "val/dog": 1,
    "valid/cat": 2,
    "valid/dog": 2,
}
BOTH = {"train/cat": 1, "train/dog": 1, "heldout/cat": 1, "heldout/dog": 1}
NO_TRAIN = {"val/cat": 1, "val/dog": 1, "test/cat": 1, "test/dog": 1}
DEEP = {"bus/a/b": 4, "train/a": 4, "tram": 4}
ALL = "the folder"
KEPT = "75 % of the folder"
OUT = "25 % held out of the folder"
AFTER_TREINO = "validação/; teste/: for --split test"
TWO_TRAINED = {"train/cat": 1, "train/dog": 1}
ALONE = {"is_eval_only": True}
HELD_OUT = {"is_eval_only": True, "is_training_data": True}

# folders with their numbers of images, flags -> numbers of images, what is trained on, what is
# evaluated
FOLDERS = [
    (FLAT, {}, (15, 5), KEPT, OUT),
    (FLAT, ALONE, (20, 20), ALL, ALL),
    (FLAT, HELD_OUT, (5, 5), OUT, OUT),
    (FLAT, HELD_OUT | {"split": "all"}, (20, 20), ALL, ALL),
    (SPLIT, {}, (20, 5), "train/", "Val/; test/: for --split test"),
    (SPLIT, {"split": "test"}, (20, 1), "train/", "test/; Val/: for --split val"),
    (SPLIT, ALONE | {"split": "test"}, (1, 1), "test/", "test/"),
    (SPLIT | {"extra/cat": 1}, ALONE | {"split": "extra"}, (1, 1), "extra/", "extra/"),
    # Test data never choose a model unless --split says so; a share that is not needed is not
    # judged.
    (NO_VAL, {}, (15, 5), "75 % of train/", "25 % held out of train/; Test/: for --split test"),
    (NO_VAL, {"split": "test", "val_share": 7}, (20, 4), "train/", "Test/"),
    (NO_VAL, ALONE, (4, 4), "Test/", "Test/"),
    (NO_VAL, HELD_OUT, (5, 5), "25 % held out of train/", "25 % held out of train/"),
    (TWO_VAL, {"split": "valid"}, (20, 4), "train/", "valid/; val/: for --split val"),
    # A class may be called train, keeps an image to train on, and may have none to evaluate.
    (DEEP, {}, (9, 3), KEPT, OUT),
    (
        {"a": 1, "b": 2, "c": 1},
        {"val_share": 0.9},
        (3, 1),
        "10 % of the folder",
        "90 % held out of the folder",
    ),
    (TWO_TRAINED | {"val/cat": None, "val/dog": 2}, {}, (2, 2), "train/", "val/"),
    (FLAT | {"original.tar": ""}, {}, (15, 5), KEPT, OUT),
    # What systems leave beside pictures is neither a class nor a picture.
    (
        FLAT | {"cat/@eaDir/0.png": 3, "dog/__MACOSX": 2, "#recycle": 3, "@Recycle/a": 1},
        {},
        (15, 5),
        KEPT,
        OUT,
    ),
    (
        {"treino/cat": 8, "treino/dog": 12, "validação/cat": 2, "teste/dog": 1},
        {},
        (20, 2),
        "treino/",
        AFTER_TREINO,
    ),
]


@pytest.mark.parametrize("folders, flags, counts, trained, evaluated", FOLDERS)
def test_folders_are_parts_or_classes(tmp_path, folders, flags, counts, trained, evaluated):
    train, val = read(draw_tree(tmp_path, folders), **flags)
    assert (len(train), len(val)) == counts
    assert train.split_text == trained
    assert val.split_text == evaluated
    assert train.classes == val.classes
    assert train.labels.dtype == np.int64
    for source in (train, val):
        for index, name in enumerate(names(source, tmp_path)):
            assert source.classes[source.labels[index]] in Path(name).parts
            assert source.load_image(np.int64(index)).getpixel((0, 0))[0] == int(Path(name).stem)


USUAL_NAMES = (
    "train,val,test",
    "TRAIN,VALID,TESTING",
    "training,validation,testing",
    "train_images,dev,test_images",
    "training_set,validation_set,test_set",
    "train2017,val2017,test2017",
    "seg_train,eval,seg_test",
    "Train Data,Validation Data,Test Data",
)


def test_parts_are_known_by_their_usual_names():
    for line in USUAL_NAMES:
        train, val, test = line.split(",")
        assert get_split_kind(train) == "train"
        assert get_split_kind(val) == "val"
        assert get_split_kind(test) == "test"
    assert get_split_kind("trainval") == "trainval"
    for name in ("cat", "tram", "testament"):
        assert get_split_kind(name) == ""
    deep = {
        "train": ["/val/train/en/0.tar", "/val/extra/0.tar"],
        "val": ["/val/dev/en/0.tar", "/val/Val-1/fr/0.tar"],
    }
    assert group_by_split(deep["train"] + deep["val"]) == deep
    files = ["/test/a.csv", "/test/b.csv"]
    assert group_by_split(files) == {"train": files}
    signed = {"train": ["https://h/a.tar?val"], "test": ["https://h/test_0.tar?val"]}
    assert group_by_split(signed["train"] + signed["test"]) == signed


NFC = unicodedata.normalize("NFC", "café")
NFD = unicodedata.normalize("NFD", "café")
HEIC = dict.fromkeys((f"cat/{n}.HEIC" for n in range(9)), "")
TINY = {
    "val/images": 4,
    "val/val_annotations.txt": "".join(f"{n}.png\t{'dog' if n else 'cat'}\t0\n" for n in range(4)),
}
BAD_FOLDERS = [
    ({}, {}, "FOLDER: no class folders; images belong in one subfolder per class"),
    ({"cat": 1}, {}, "FOLDER: only the class folder cat/; "),
    (FLAT | {"emu": None}, {}, "FOLDER/emu: no images in this class folder; add some"),
    (FLAT, {"split": "test"}, "--split test: --data FOLDER has no such split; there is train"),
    (
        SPLIT | {"Val/emu": 1},
        {},
        "FOLDER/Val/emu: a class that FOLDER/train does not have; add it there",
    ),
    (SPLIT | {"Val/Cat": 1}, {}, "does not have; add it there; did you mean cat?"),
    ({"train/cat": 1, "train/dog": 1, "val": None}, {}, "FOLDER/val: no images to evaluate on"),
    (TWO_VAL, {}, "val/ and valid/ could each be the split val; keep one, or name it"),
    (BOTH, {}, "train/ and heldout/ both have the folders cat/ and dog/, so they seem to be parts"),
    (NO_TRAIN, {}, "no split to train on, only test, val; rename one to train"),
    (FLAT, {"label_column": "label"}, "is no table, so leave out --image_column"),
    (FLAT, {"val_share": 0.01}, "--val_share 0.01 of at most 12 images per class holds out none"),
    (
        FLAT | HEIC,
        {},
        "cat: most of its 17 images would be left out: 9 (.heic)",
    ),
    (
        TWO_TRAINED | {"val": 4},
        {},
        "FOLDER/val: 4 images in one folder for all classes; move each into",
    ),
    (
        TWO_TRAINED | {"val/images": 4},
        {},
        "FOLDER/val/images: 4 images in one folder for all classes; move each",
    ),
    (
        TWO_TRAINED | TINY | {"val/val_annotations.txt": "0.png\temu\n"},
        {},
        "val_annotations.txt: line 1 must be a name and a",
    ),
    (
        {"fold_1/a": 1, "fold_1/b": 1, "fold_2/a": 1, "fold_2/b": 1},
        {},
        "fold_1, fold_2 each have a/ and b/ in them",
    ),
    (
        {"2019/a": 1, "2019/b": 1, "2020/a": 1, "2020/b": 1},
        {},
        "so they seem to be folds, years or the like and not",
    ),
    (
        {"cat/train": 4, "cat/val": 4, "dog": 4},
        {},
        "FOLDER/cat: has train/ and val/ in it, whose images would be mixed",
    ),
    ({"cat": 1, "cat ": 1}, {}, "'cat' and 'cat ' look like the same class; they differ in spaces"),
    ({NFC: 1, NFD: 1}, {}, r"'cafe\u0301' and 'caf\xe9' look like the same class"),
    (
        FLAT,
        {"group_column": "patient"},
        "--group_column patient: the folder has no such column; take folder for files",
    ),
    (
        SPLIT,
        {"group_column": "folder"},
        "--group_column folder: nothing is held out, since Val/ is evaluated; leave it",
    ),
    (FLAT, {"val_share": 0}, "--val_share 0: must lie between 0 and 1"),
    (FLAT, {"val_share": 1}, "--val_share 1: must lie between 0 and 1"),
    (FLAT, {"val_share": float("nan")}, "--val_share nan: must lie between 0 and 1"),
]


@pytest.mark.parametrize("folders, flags, text", BAD_FOLDERS)
def test_folder_refusals_name_the_folder_and_the_way_out(tmp_path, folders, flags, text):
    assert text.replace("FOLDER", str(tmp_path)) in refusal(draw_tree(tmp_path, folders), **flags)


def test_images_are_known_by_their_content_and_others_named(tmp_path):
    draw_tree(
        tmp_path, FLAT | {"cat/a.txt": "", "cat/b.heic": "", "dog/c.heic": "", "dog/d": "no image"}
    )
    for name in ("cat/0", "cat/1.jpg_large", "dog/2.jpg_large"):
        draw_picture(tmp_path / "0.png", int(name[4]) + 20).rename(tmp_path / name)
    train, val = read(tmp_path)
    assert len(train) + len(val) == 23
    assert train.notes == (
        f"25 images, left out: 2 (.heic), first {tmp_path}/cat/b.heic",
        f"1 of 25 images (without a suffix) are known by their first bytes, first {tmp_path}/cat/0",
        "2 of 25 images (.jpg_large) are known by their first bytes, first "
        f"{tmp_path}/cat/1.jpg_large",
        f"1 (.txt) beside the images are not read, first {tmp_path}/cat/a.txt",
        f"1 (without a suffix) beside the images are not read, first {tmp_path}/dog/d",
    )


def test_class_names_that_look_the_same_are_the_same(tmp_path):
    folders = {f"train/{NFD}": 2, "train/tea ": 2, f"val/{NFC}": 3, "val/tea": 4}
    train, val = read(draw_tree(tmp_path, folders))
    assert train.classes == val.classes == (NFD, "tea ")
    assert val.class_counts.tolist() == [3, 4]


def test_tiny_imagenets_list_names_the_classes(tmp_path):
    _, val = read(draw_tree(tmp_path, {"train/cat/images": 2, "train/dog/images": 2} | TINY))
    assert names(val, tmp_path) == [f"val/images/{n}.png" for n in range(4)]
    assert val.labels.tolist() == [0, 1, 1, 1]
    assert val.classes == ("cat", "dog")
    assert reds(val) == [0, 1, 2, 3]


def test_a_list_with_letters_composed_otherwise_is_explained(tmp_path):
    rows = "".join(f"{NFC}/{n}.png,{'ab'[n % 2]}\n" for n in range(4))
    draw_tree(tmp_path, {NFD: 4, "list.csv": f"file,kind\n{rows}"})
    missing = f"4 of 4 images are missing, the first is {tmp_path}/{NFC}/0.png"
    assert f"{missing} (there with its letters composed" in refusal(tmp_path / "list.csv")


def test_folders_that_all_classes_have_are_named(tmp_path):
    train, _ = read(draw_tree(tmp_path, {"cat/in": 4, "cat/out": 4, "dog/in": 4, "dog/out": 4}))
    assert train.notes == (
        "the classes cat, dog each have in/ and out/ in them: if those are the classes, name the "
        "folders above train and val",
    )


# ---- groups and copies


def test_a_group_is_on_one_side_and_classes_keep_their_share(tmp_path):
    """20 patients with 1 to 8 images each, some in both classes: in folders, a CSV file and Parquet."""
    generator = np.random.default_rng(0)
    counts = {}
    for n in range(20):
        kinds = ("dog",) if n % 3 == 0 else ("cat", "dog")
        for kind in kinds:
            counts[f"{kind}/p{n}"] = int(generator.integers(1, 5))
    draw_tree(tmp_path / "images", counts)
    lines = ["file,kind,person"]
    for patient, count in counts.items():
        kind, person = patient.split("/p")
        for n in range(count):
            lines.append(f"images/{patient}/{n}.png,{kind},{person}")
    csv = tmp_path / "a.csv"
    csv.write_text("\n".join(lines))
    pq.write_table(pa.csv.read_csv(csv), tmp_path / "a.parquet")
    for data, column in (("images", "folder"), ("a.csv", "person"), ("a.parquet", "person")):
        options = {"seed": 3, "group_column": column}
        if data != "images":
            options["image_column"] = "file"
        train, val = read(tmp_path / data, **options)
        train_patients = {Path(name).parent.name for name in names(train, tmp_path)}
        val_patients = {Path(name).parent.name for name in names(val, tmp_path)}
        assert val_patients
        assert not val_patients & train_patients
        shares = val.class_counts / (train.class_counts + val.class_counts)
        assert val.split_text.endswith(f" by {column}")
        assert np.abs(shares - 0.25).max() < 0.07  # of 33 and 55 images, in groups of 1 to 8
        held_out = read_split(tmp_path / data, is_training_data=True, **options)
        assert names(held_out, tmp_path) == names(val, tmp_path)
        options["seed"] = 4
        _, with_another_seed = read(tmp_path / data, **options)
        assert names(with_another_seed, tmp_path) != names(val, tmp_path)
    reason = "--group_column who: is no column of --data"
    assert reason in refusal(csv, group_column="who", label_column="kind", image_column="file")
    csv.write_text("\n".join(lines + ["images/x.png,cat,"]))
    reason = f"row {len(lines) - 1} has nothing in --group_column person"
    assert reason in refusal(csv, group_column="person", image_column="file")


def test_rows_of_an_image_are_on_one_side(tmp_path):
    """Three rows of each image, by path or by bytes; under another name in a folder."""
    for number in range(12):
        draw_picture(tmp_path / f"{number}.png", number)
    lines = [f"{n}.png,{'ab'[n % 2]}" for n in range(12)] * 3
    (tmp_path / "a.csv").write_text("\n".join(["file,kind"] + lines))
    with_copies = labelled(list("ab") * 18).map(
        lambda _, row: {"image": png(row % 12)}, with_indices=True
    )
    with_copies.to_parquet(tmp_path / "b.parquet")
    draw_tree(tmp_path / "c", {"a": 6, "b": 6})
    for number in range(6):
        for copy in "xy":
            shutil.copy(tmp_path / f"c/a/{number}.png", tmp_path / f"c/a/{copy}{number}.png")
    for data, copies, first in (
        ("a.csv", 24, "0.png"),
        ("b.parquet", 24, "train[12]"),
        ("c", 12, "a/x0.png"),
    ):
        train, val = read(tmp_path / data)
        num_images = len(train) + len(val)
        train_reds = set(reds(train))
        assert train_reds.isdisjoint(reds(val)) or (data == "c" and num_images == 24)
        note = f"{copies} of {num_images} images are copies, by path or bytes, of others"
        assert note in train.notes[0]
        assert train.notes[0].endswith(first)
        assert 0.15 <= len(val) / num_images <= 0.35
    train_originals = set(zip(train.labels.tolist(), reds(train), strict=True))
    val_originals = set(zip(val.labels.tolist(), reds(val), strict=True))
    assert not val_originals & train_originals
    for kind in "ab":
        for number in range(6):
            draw_picture(tmp_path / f"d/{kind}/{number}.png", 3)
    train, val = read(tmp_path / "d")
    assert len(train) == 8
    assert len(val) == 4
    assert "of others on any side, since few images are differ" in train.notes[0]


def test_images_of_train_in_val_are_counted_or_refused(tmp_path):
    draw_tree(tmp_path, {"train/cat": 4, "train/dog": 4, "val/cat": 4, "val/dog": 4})
    for number in range(5):
        shutil.copy(tmp_path / f"train/cat/{number % 4}.png", tmp_path / f"val/dog/{number}.png")
        if number == 1:
            _, val = read(tmp_path)
            text = "2 of 8 images are in train/, too, by path or bytes, first"
            assert val.notes == (f"{text} {tmp_path}/val/dog/0.png",)
            assert not read_split(tmp_path).notes
    assert "val/: 5 of 9 images are in train/, too, by path or bytes, first" in refusal(tmp_path)
    assert len(read(tmp_path, split="train")[1]) == 8  # as it was asked for


def test_paths_of_nothing_are_refused(tmp_path, monkeypatch):
    assert f"--data {tmp_path}/missing: nothing is there; expected" in refusal(tmp_path / "missing")
    assert "nothing is there" in refusal(tmp_path / "missing.parquet")
    (tmp_path / "notes.txt").write_text("a,b")
    assert "a file of a kind that is not known; expected digits" in refusal(tmp_path / "notes.txt")
    assert "leave out --image_column" in refusal("digits", image_column="image")
    denied = PermissionError(13, "Permission denied", str(tmp_path))
    monkeypatch.setattr(os, "scandir", MagicMock(side_effect=denied))
    assert f"no permission to read {tmp_path}" in refusal(tmp_path)


def test_the_hold_out_is_stratified_and_stays_when_files_come(tmp_path):
    root = draw_pets(tmp_path / "a", cats=20, dogs=20)
    train, val = read(root, seed=1)
    assert np.bincount(train.labels).tolist() == [15, 15]
    assert np.bincount(val.labels).tolist() == [5, 5]
    held_out = names(val, root)
    assert len(set(names(train, root) + held_out)) == 40
    assert names(read_split(root, seed=1, is_training_data=True), root) == held_out
    assert any(names(read(root, seed=seed)[1], root) != held_out for seed in (2, 3, 4))
    root = root.rename(tmp_path / "b")
    before = set(held_out)
    assert set(names(read(root, seed=1)[1], root)) == before
    for index in range(20, 24):
        draw_picture(root / f"cat/{index}.png", index)
        after = set(names(read(root, seed=1)[1], root))
        changed = before ^ after
        assert len(changed - {f"cat/{index}.png"}) <= 1
        assert not any(name.startswith("dog") for name in changed)
        before = after


def test_images_are_found_through_links_and_under_odd_names(tmp_path):
    """Never hidden ones. Links do not lead in circles, and a dangling one is a broken image."""
    draw_pets(tmp_path / "store", cats=2, dogs=2)
    root = tmp_path / "data"
    visible = ("cat/UPPER.PNG", "cat/odd.png")
    for name in visible + ("cat/.hidden.png", "cat/.thumbnails/0.png", ".git/0.png", "beside.png"):
        draw_picture(root / name)
    (root / "cat/notes.txt").write_text("no image")
    os.rename(root / "cat/odd.png", os.fsencode(root) + b"/cat/\xff\xfe.png")
    for link, target in {
        "dog": "store/dog",
        "cat/linked": "store/cat",
        "cat/circle": "data/cat",
        "cat/gone.png": "gone",
    }.items():
        (root / link).symlink_to(tmp_path / target)
    by_name = {}
    for source in read(root):
        for index, name in enumerate(names(source, root)):
            by_name[name] = (source, index)
    assert {name.lower() for name in by_name} == {
        "cat/upper.png",
        "cat/\\xff\\xfe.png",
        "cat/gone.png",
        "cat/linked/0.png",
        "cat/linked/1.png",
        "dog/0.png",
        "dog/1.png",
    }
    source, index = by_name.pop("cat/gone.png")
    with pytest.raises(BrokenImage, match="No such file"):
        source.load_image(index)
    for source, index in by_name.values():
        assert source.load_image(index).size == (4, 3)


def list_images(root: Path) -> Path:
    """A list of absolute paths."""
    rows = [f"{path},{path.parent.name}\n" for path in sorted(root.rglob("*.png"))]
    (root / "list.csv").write_text("image,label\n" + "".join(rows))
    return root / "list.csv"


@pytest.mark.parametrize("get_data", [Path, list_images])
def test_a_fingerprint_is_of_the_content_not_of_the_place(tmp_path, get_data):
    def fingerprints(root: Path) -> list[str]:
        return [source.fingerprint for source in read(get_data(root))]

    original = fingerprints(draw_pets(tmp_path / "a"))
    assert fingerprints(draw_pets(tmp_path / "elsewhere/b")) == original
    changes = [
        lambda root: draw_picture(root / "cat/99.png"),
        lambda root: (root / "cat/0.png").write_bytes(b"another size"),
        lambda root: (root / "cat/0.png").rename(root / "cat/zero.png"),
        lambda root: (root / "cat").rename(root / "cab"),
    ]
    for index, change in enumerate(changes):
        change(draw_pets(tmp_path / str(index)))
        assert fingerprints(tmp_path / str(index)) != original, index


@pytest.mark.parametrize("run", ["runs/first", "first", "cat/mine", "train/runs/first"])
def test_runs_in_the_data_folder_are_no_data(tmp_path, run):
    """As `--data .` leaves them there, and as the present run has made its own folder before."""
    root = draw_pets(tmp_path / "train").parent if run.startswith("train/") else draw_pets(tmp_path)
    before = [source.fingerprint for source in read(root)]
    files = {".lock": "", "log.txt": "", "pictures/first_batch.png": 3, "best/model.png": 4}
    draw_tree(root / run, files)
    train, val = read(root)
    assert [train.fingerprint, val.fingerprint] == before
    assert train.classes == ("cat", "dog")
    is_beside_classes = run in ("runs/first", "first")
    note = f"left out: runs of these recipes in {run.split('/')[0]}/"
    assert (note in train.notes) == is_beside_classes


def test_runs_that_recorded_whole_paths_still_know_their_data(tmp_path):
    def compute_as_0_2_0(source) -> str:
        header = json.dumps([source.classes, source.labels.shape])
        digest = hashlib.blake2b(header.encode(), digest_size=16)
        names = [source.get_name(index) for index in range(len(source))]
        for content in (source.labels.tobytes(), source.sizes.tobytes(), repr(names).encode()):
            digest.update(content)
        return digest.hexdigest()[:12]

    train, val = read(list_images(draw_pets(tmp_path / "a")))
    recorded = f"{compute_as_0_2_0(train)}-{compute_as_0_2_0(val)}"
    present = join_fingerprints(train, val)
    assert recorded != present
    assert is_fingerprint(recorded, train, val)
    assert is_fingerprint(present, train, val)
    assert not is_fingerprint(recorded, val, train)
    assert not is_fingerprint("", train, val)


# ---- tables


def png(value: int, green: int = 1) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (value, green, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def table(count: int = 20, feature: object = None, **columns) -> datasets.Dataset:
    """Images whose first pixel's red is their row, others for another `count`; labels go round
    three classes.
    """
    if not columns:
        columns = {"label": [row % 3 for row in range(count)]}
    images = [png(row, count) for row in range(count)]
    data = datasets.Dataset.from_dict({"image": images} | columns)
    data = data.cast_column("image", datasets.Image())
    return data.cast_column("label", feature) if feature else data


def labelled(labels: list, feature: object = None) -> datasets.Dataset:
    return table(len(labels), feature, label=labels)


def classified(count: int = 20, class_names="abc") -> datasets.Dataset:
    return table(count, datasets.ClassLabel(names=list(class_names)))


def saved(root: Path, **splits: datasets.Dataset) -> Path:
    datasets.DatasetDict(splits).save_to_disk(root)
    return root


def check_rows(*sources):
    for source in sources:
        assert reds(source) == source.rows.tolist()
        assert source.labels.tolist() == (source.rows % 3).tolist()
        assert source.labels.dtype == np.int64
        assert not source.multi_label
        assert len(source.fingerprint) == 32


def test_saved_data_and_parquet_hold_out_the_same_rows(tmp_path):
    data = classified(30)
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    for half in range(2):
        data.shard(2, half, contiguous=True).to_parquet(tmp_path / f"folder/{half}.parquet")
    splits = []
    for path in ("saved", "folder", "folder/*.parquet"):
        train, val = read(tmp_path / path)
        assert train.classes == val.classes == ("a", "b", "c")
        check_rows(train, val)
        held_out = val.rows.tolist()
        assert sorted(train.rows.tolist() + held_out) == list(range(30))
        assert np.bincount(val.labels).tolist() == [3, 3, 3]  # a quarter of 10, rounded up
        assert val.get_name(0) == f"{tmp_path / path} train[{held_out[0]}]"
        splits.append((held_out, train.fingerprint, val.fingerprint))
    assert splits[0] == splits[1] == splits[2]
    assert read(tmp_path / "saved", seed=1)[1].rows.tolist() != held_out


def test_a_split_to_evaluate_on_is_used_as_it_is(tmp_path):
    splits = {"train": classified(9), "Dev": classified(6)}
    saved(tmp_path / "saved", **splits)
    for name, split in splits.items():
        for file in (f"folder/data/{name}-00000-of-00001.parquet", f"nested/{name}/0000.parquet"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            split.to_parquet(tmp_path / file)
    for path in ("saved", "folder", "nested"):
        train, val = read(tmp_path / path, val_share=7)  # not asked for, so not judged
        split = "Dev" if path == "saved" else "val"
        assert len(train) == 9
        assert len(val) == 6
        assert val.get_name(5) == f"{tmp_path / path} {split}[5]"
        check_rows(train, val)
    assert read_split(tmp_path / "saved", "dev").split_text == "split Dev"
    assert len(read_split(tmp_path / "saved")) == 6
    splits["train"].to_parquet(tmp_path / "test.parquet")
    assert len(read_split(tmp_path / "test.parquet")) == 9
    assert len(read_split(tmp_path / "test.parquet", is_training_data=True)) == 3


def test_lists_of_labels_are_several_labels_of_an_image(tmp_path):
    tags = [[0], [0, 2], [], [1, 2], [2]]
    named = datasets.List(datasets.ClassLabel(names=["x", "y", "z", "never"]))
    labelled(tags, named).save_to_disk(tmp_path / "named")
    letters = [["xyz"[tag] for tag in row] for row in tags]
    labelled(letters).save_to_disk(tmp_path / "text")
    for name, expected in {"named": ("x", "y", "z", "never"), "text": ("x", "y", "z")}.items():
        for source, count in zip(read(tmp_path / name, val_share=0.4), (3, 2), strict=True):
            assert source.multi_label
            assert source.classes == expected
            assert source.labels.dtype == bool
            assert source.labels.shape == (count, len(expected))
            for row, label in zip(source.rows, source.labels, strict=True):
                assert np.flatnonzero(label).tolist() == tags[row]
    mixed = MANY.select_columns(["image", "fine"]).add_column("kind", [0, 1, 0, 1])
    saved(tmp_path / "mixed", train=mixed.cast_column("kind", TWO))
    assert read(tmp_path / "mixed", val_share=0.5)[0].classes == ("a", "b")


def test_images_may_be_bytes_paths_or_a_pair(tmp_path):
    rows = range(6)
    files = [draw_picture(tmp_path / f"images/{row}.png", row) for row in rows]
    paths = [str(file.relative_to(tmp_path)) for file in files]
    contents = [png(row) for row in rows]
    pairs = [{"bytes": png(row), "path": f"{row}.png"} for row in rows]
    for column, cells in {"content": contents, "image": pairs, "file": paths}.items():
        columns = {column: cells, "label": [row % 3 for row in rows]}
        pq.write_table(pa.table(columns), tmp_path / f"{column}.parquet")
        train, val = read(tmp_path / f"{column}.parquet", val_share=0.5)
        check_rows(train, val)
        assert train.fingerprint != val.fingerprint


def test_a_broken_cell_is_one_broken_image(tmp_path):
    content = {"image": [png(0), b"no image", None, png(3)[:30], png(4), b""], "label": [0, 1] * 3}
    data = datasets.Dataset.from_dict(content).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "a.parquet")
    pq.write_table(pa.table(content), tmp_path / "b.parquet")
    for name in ("a.parquet", "b.parquet"):
        source = read_split(tmp_path / name)
        errors = {}
        for row in range(6):
            try:
                assert source.load_image(row).getpixel((0, 0))[0] == row
            except BrokenImage as error:
                errors[row] = str(error)
        assert sorted(errors) == [1, 2, 3, 5]
        assert errors[2] == "the row has no image"


def test_table_fingerprint_follows_images_labels_and_classes(tmp_path):
    noise = Image.effect_noise((64, 64), 50)
    larger_image = classified(12).select([11]).map(lambda row: {"image": noise})
    variants = {
        "original": classified(12),
        "another order": classified(12).select(np.roll(np.arange(12), -1)),
        "other classes": classified(12, "abz"),
        "another image": datasets.concatenate_datasets([classified(11), larger_image]),
        "same": classified(12),
    }
    fingerprints = {}
    for name, data in variants.items():
        train, val = read(saved(tmp_path / name, train=data))
        fingerprints[name] = (train.fingerprint, val.fingerprint)
    assert fingerprints.pop("same") == fingerprints["original"]
    assert len(set(fingerprints.values())) == 4


TWO = datasets.ClassLabel(names=["a", "b"])
MANY = table(4, fine=[0, 1, 2, 3], coarse=[0, 0, 1, 1], score=[0.1, 0.2, 0.3, 0.4])
MANY = MANY.add_column("second", [png(row) for row in range(4)])
MANY = MANY.cast_column("second", datasets.Image())

SECOND = {"image_column": "second"}
SCORE = {"image_column": "image", "label_column": "second"}
WRONG = (
    "train: row 3 has label -1 in column label, but the 2 classes are 0 to 1; remove the row or "
    "correct it"
)

# splits, or the only one; flags -> the refusal
BAD_TABLES = [
    (labelled([0, 1, 1, -1], TWO), {}, WRONG),
    (labelled([0, 1, None, 1], TWO), {}, "row 2 has no label in column label (null)"),
    (labelled([0, -1, 5]), {}, "row 1 has label -1 in column label, but the 2 classes are 0, 5"),
    (labelled([[0, 1, 0], [1, 0, 0]]), {}, "row 0 has a class twice"),
    (
        labelled([[1, 0], [0, 1], [1, 0]]),
        {},
        "row 0, as each one, has both classes in column label; a row lists the ids",
    ),
    (labelled([[1.0, 0.0], [0.0, 1.0]]), {}, "row 0, as each one, has both classes"),
    (labelled([[True, False], [False, True]]), {}, "row 0, as each one, has both classes"),
    (labelled([["1", "0"], [" 0", "1"]]), {}, "row 0, as each one, has both classes"),
    (labelled(["a", " ", "b"]), {}, "row 1 has no label in column label (null)"),
    (labelled([0.0, float("nan"), 1.0]), {}, "row 1 has no label in column label (null)"),
    (
        labelled([-1, 1, -1, 0]),
        {},
        "row 0 has label -1 in column label, but the 2 classes are 0, 1",
    ),
    (MANY, {}, "image, second could each be the image; name it with --image_column NAME (c"),
    (MANY, SECOND, "fine, coarse could each be the label; name it with --label_column NAME"),
    (MANY, {"image_column": "picture"}, "--image_column picture: is no column of --data"),
    (MANY, SCORE, "--label_column second: can't be the label column"),
    ({"train": labelled(["a", "b"]), "val": labelled(["a", "c"])}, {}, "val: row 1 has label 'c'"),
    (
        {"train": classified(6), "val": classified(6, "acb")},
        {},
        "train and val name other classes in label",
    ),
    ({"train": classified(6), "val": MANY}, {}, "split val has no column label, which train has"),
]


@pytest.mark.parametrize("splits, flags, text", BAD_TABLES, ids=range(len(BAD_TABLES)))
def test_tables_are_refused_with_row_value_or_column_and_flag(tmp_path, splits, flags, text):
    splits = splits if isinstance(splits, dict) else {"train": splits}
    assert text in refusal(saved(tmp_path / "saved", **splits), **flags)


@pytest.mark.parametrize(
    "labels, classes",
    [
        ([True, False] * 4, ("False", "True")),
        ([2.0, 10.0] * 4, ("2", "10")),
        ([0.5, 1.5] * 4, ("0.5", "1.5")),
        (["cat", "dog ", " cat", "dog"] * 2, ("cat", "dog")),
        ([1, -1] * 4, ("-1", "1")),
        ([[0, 1], [0]] * 4, ("0", "1")),
        ([["a ", "b"], ["a"]] * 4, ("a", "b")),
    ],
)
def test_labels_of_any_type_are_read_as_in_a_csv_file(tmp_path, labels, classes):
    train, val = read(saved(tmp_path / "saved", train=labelled(labels)))
    assert train.classes == classes
    if not isinstance(labels[0], list):
        lines = ["image,label"]
        for row, label in enumerate(labels):
            path = draw_picture(tmp_path / f"{row}.png", row)
            lines.append(f"{path.name},{label}")
        (tmp_path / "same.csv").write_text("\n".join(lines))
        csv_train, csv_val = read(tmp_path / "same.csv")
        assert csv_train.classes == classes
        assert csv_train.labels.tolist() == train.labels.tolist()
        assert csv_val.labels.tolist() == val.labels.tolist()


def test_brackets_in_a_path_stand_for_themselves(tmp_path):
    root = tmp_path / "shells [final]"
    (root / "data [1]").mkdir(parents=True)
    for split, count in (("train", 9), ("val", 8)):
        classified(count).to_parquet(root / f"data [1]/{split}.parquet")
        for label, value in (("a", 0), ("b", 50)):
            draw_picture(root / f"{split}_{label}.png", value + (split == "val"))
        (root / f"{split}.csv").write_text(f"image,label\n{split}_a.png,a\n{split}_b.png,b\n")
    for pattern in ("data [1]", "data [1]/*.parquet", "data [1]/[tv]*.parquet", "*.csv"):
        train, val = read(root / pattern)
        assert (train.split_text, val.split_text) == ("split train", "split val"), pattern
    assert len(read(root / "data [1]/val.parquet")[0]) == 5
    assert len(read_split(root / "val.csv")) == 2


def test_a_test_part_without_labels_does_not_block_training(tmp_path):
    for root in (tmp_path / "parquet", tmp_path / "csv"):
        root.mkdir()
    classified(9).to_parquet(tmp_path / "parquet/train.parquet")
    classified(9).remove_columns("label").to_parquet(tmp_path / "parquet/test.parquet")
    for number in range(8):
        draw_picture(tmp_path / f"csv/{number}.png", number)
    lines = [f"{number}.png,{10 if number % 2 else 1}\n" for number in range(8)]
    (tmp_path / "csv/train.csv").write_text("image,label\n" + "".join(lines))
    (tmp_path / "csv/test.csv").write_text("image\n0.png\n")
    for path in ("parquet", "csv/*.csv"):
        train, val = read(tmp_path / path)
        assert train.split_text == "75 % of split train"
        assert len(train) + len(val) in (8, 9)
        reason = "split test has no column label, which train has"
        assert reason in refusal(tmp_path / path, split="test")


def test_damaged_tables_are_refused_in_one_line(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    assert "can't be read as a Hugging Face data set: " in refusal(tmp_path / "torn.parquet")
    beyond = pa.table({"image": [png(0), png(1)], "label": pa.array([0, 2], pa.int64())})
    features = datasets.Features({"image": datasets.Value("binary"), "label": TWO})
    metadata = features.arrow_schema.metadata
    pq.write_table(beyond.replace_schema_metadata(metadata), tmp_path / "beyond.parquet")
    assert "row 1 has label 2 in column label, but the 2 " in refusal(tmp_path / "beyond.parquet")


# ---- CSV


def sheet(root: Path, text: str, rows: list[str] = (), encoding: str = "utf-8") -> Path:
    """A CSV file beside images whose first pixel's red is their number `n`.

    `text` is the first line, and the format of one line for each image; `rows` are further lines.
    """
    for number in range(12):
        draw_picture(root / f"images/{number}.png", number)
    head, *formats = text.splitlines()
    words = {
        "three": (0, 1, 2),
        "number": (9, 10, 11),
        "abc": "abc",
        "nothing": ("NA", "none", "null"),
    }
    values = [
        {"n": n, "two": n % 2} | {kind: of[n % 3] for kind, of in words.items()} for n in range(12)
    ]
    lines = [line.format(**value) for line in formats for value in values]
    (root / "labels.csv").write_text("\n".join([head, *lines, *rows]) + "\n", encoding=encoding)
    return root / "labels.csv"


@pytest.mark.parametrize(
    "text, classes",
    [
        ("file,kind\nimages/{n}.png,{abc}", "a b c"),
        ("Image Name , Kind\nimages/{n}.png , {abc}", "a b c"),
        ("\ufefffile;kind\nimages/{n}.png;{three}", "0 1 2"),
        ("file\tkind\nimages/{n}.png\t00{three}", "000 001 002"),
        ("kind|file\n{three}.0|images/{n}.png", "0 1 2"),
        (',"file","kind"\n{n},"images/{n}.png","N,{abc}"', "N,a N,b N,c"),
        ("file,kind\nimages/{n}.png,{number}", "9 10 11"),
        ("file,kind\nimages/{n}.png,{nothing}", "NA none null"),
    ],
)
def test_a_csv_file_is_read_whatever_its_separator(tmp_path, text, classes):
    train, val = read(sheet(tmp_path, text))
    assert train.classes == val.classes == tuple(classes.split()) and (len(train), len(val)) == (
        9,
        3,
    )
    assert sorted(reds(train) + reds(val)) == list(range(12))
    assert val.labels.tolist() == [number % 3 for number in reds(val)]
    assert val.get_name(0) == f"{tmp_path}/images/{reds(val)[0]}.png"


def test_a_column_split_or_several_files_are_parts(tmp_path):
    parts = ["Training"] * 6 + ["dev"] * 4 + ["Test"] * 2
    rows = [f"images/{n}.png,{n % 2},{part}" for n, part in enumerate(parts)]
    pq.write_table(
        pa.csv.read_csv(sheet(tmp_path, "file,kind,Split", rows)), tmp_path / "labels.parquet"
    )
    for place in (tmp_path / "labels.csv", tmp_path / "labels.parquet"):
        train, val = read(place, image_column="file", label_column="kind")
        assert (reds(train), reds(val)) == (list(range(6)), list(range(6, 10)))
        assert val.split_text == "split dev; split Test: for --split test"
        assert reds(read(place, split="test")[1]) == [10, 11] == reds(read_split(place, "test"))
    for name, numbers in (("train", range(8)), ("val", range(4, 12))):
        lines = "".join(f"images/{n}.png,{'ab'[n % 2]}\n" for n in numbers)
        (tmp_path / f"{name}.tsv").write_text(f"file,kind\n{lines}")
    train, val = read(tmp_path / "*.tsv")
    assert (reds(train), reds(val), val.classes) == (list(range(8)), list(range(4, 12)), ("a", "b"))


def test_columns_of_0_and_1_are_the_classes_of_an_image(tmp_path):
    rows = [f"images/{n}.png,{n % 2},{int(n % 3 == 0)},{int(n > 3)}" for n in range(12)]
    for named, classes in (("x,y,z", ("x", "y", "z")), ("z, x", ("z", "x"))):
        train, val = read(sheet(tmp_path, "file,x,y,z", rows), label_column=named)
        assert train.multi_label and train.classes == classes
        for row, number in zip(val.labels.tolist(), reds(val), strict=True):
            shows = {"x": number % 2 == 1, "y": number % 3 == 0, "z": number > 3}
            assert row == [shows[name] for name in val.classes]
    rows = [f"images/{n}.png,{n % 2 == 0},{float(n % 2 == 1)},{n}" for n in range(12)]
    train, val = read(sheet(tmp_path, "file,x,y,age", rows), label_column="x,y")
    assert val.labels.tolist() == [[number % 2 == 0, number % 2 == 1] for number in reds(val)]


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("sep=;\nimage;label\n{rows}", "utf-8"),
        ('image;label;"x, y, z"\n{rows};1,5', "utf-16"),
        ("image;label, kind\n{rows}", "utf-8-sig"),
        ('image;label;notes\n{rows};"a, b\nc, d; e"', "utf-16-be"),
    ],
)
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_csv_files_of_any_program_are_read(tmp_path, text, encoding, line_break):
    head, _, form = text.rpartition("\n{rows}")
    rows = [
        f"{draw_picture(tmp_path / f'{row}.png', row).name};{'ab'[row % 2]}{form}"
        for row in range(8)
    ]
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = mark + "\n".join([head, *rows, ""])
    (tmp_path / "labels.csv").write_bytes(text.replace("\n", line_break).encode(encoding))
    label = "label, kind" if "kind" in head else "label"
    train, val = read(
        tmp_path / "labels.csv",
        image_column="image",
        **({} if "," in label else {"label_column": label}),
    )
    assert train.classes == ("a", "b")
    assert sorted(reds(train) + reds(val)) == list(range(8))


def test_most_rows_decide_which_column_names_images(tmp_path):
    rows = [f"images/{n}.png,{n % 2}" for n in range(12)]
    for first in (",0", "images/0.heic,0", "unknown,1"):
        file = sheet(tmp_path, "image,label", [first, *rows])
        assert "1 of 13 images are missing, the first is" in refusal(file, max_broken_share=0.02)
        train, val = read(file, max_broken_share=0.2)
        assert sorted([*train.rows, *val.rows]) == list(range(13)) and train.classes == ("0", "1")


def test_ids_name_files_in_a_folder_beside_the_table(tmp_path):
    for number in range(12):
        draw_picture(tmp_path / f"train_images/{number}.png", number)
        draw_picture(tmp_path / f"train_images/{number:04}a.jpg", 20 * number)
    (tmp_path / "train_images/0.txt").touch()
    for name, form in {"numbers": "{n}", "texts": "{n:04}a", "blank": ""}.items():
        lines = [f"{form.format(n=n)},{n % 2}" for n in range(12)]
        lines[0] = f"{form.format(n=0)},0"
        (tmp_path / f"{name}.csv").write_text("\n".join(["id_code,diagnosis", *lines]))
    for name, suffix in (("numbers", ".png"), ("texts", ".jpg")):
        train, val = read(tmp_path / f"{name}.csv", image_column="id_code")
        assert train.notes == (f"images: {tmp_path}/train_images/*{suffix}",)
        found = [
            Path(source.get_name(index)).stem
            for source in (train, val)
            for index in range(len(source))
        ]
        assert len(set(found)) == 12 and not len(train.missing)
    assert "12 of 12 images are missing" in refusal(tmp_path / "blank.csv", image_column="id_code")
    assert "no image column found; name it with --image_column" in refusal(tmp_path / "texts.csv")
    draw_picture(tmp_path / "small/0.png")
    assert "train: 0 could be " in refusal(tmp_path / "numbers.csv", image_column="id_code")


HEAD = "labels.csv: its first line must name"
BAD_CSV = [
    (
        "images/0.png,0\nimages/{n}.png,{n}",
        {},
        f"{HEAD} the columns, such as image,label; it is 'images/0.png,0'",
    ),
    ("file,kind", {}, "labels.csv: no rows below"),
    ("file,kind,kind\nimages/{n}.png,0,1", {}, "two columns are named kind; rename one"),
    (
        "file,kind\nimages/{n}.png,0\na,b,c",
        {},
        "labels.csv: line 14: not readable as CSV with ',' between columns: 3",
    ),
    ('file,kind\n"images/{n}.png,0', {}, "labels.csv: line 2: a quotation mark is not closed"),
    (
        'file,kind\nimages/{n}.png,{two}\na.png,"0\nb.png,1\nc.png,0',
        {},
        "line 14: a quotation mark is not closed",
    ),
    (
        'file,kind\na.png,"0\nimages/{n}.png,{two}\nb.png,1"',
        {},
        "line 2: a quotation mark is not closed",
    ),
    ("file,kind\nimages/{n}.png,{two}\nimages/1.png,", {}, "row 12 has no label in column kind"),
    ("id,kind\n{n},0", {}, "no image column found; name it with --image_column NAME"),
    (
        "file,kind\nimages/{n}.png,0",
        {"label_column": "picture,kind"},
        "has no column picture; it has file, kind",
    ),
    ("file,x,age\nimages/{n}.png,{two},{n}", {}, "x, age could each be the label"),
    (
        "file,x,age\nimages/{n}.png,{two},{n}",
        {"label_column": "x,age"},
        "row 2 has 2 in column age; each of several",
    ),
    (
        "file,kind,split\nimages/{n}.png,{two},val\na.png,1,",
        {},
        "row 12 has nothing in the column split, by which",
    ),
    ("file,kind\n{n}.png,é", {"encoding": "latin-1"}, "labels.csv: not readable as CSV"),
    ("file,kïnd\n{n}.png,a", {"encoding": "latin-1"}, "labels.csv: not readable as text"),
]


@pytest.mark.parametrize("text, flags, told", BAD_CSV)
def test_csv_refusals_name_the_file_and_the_way_out(tmp_path, text, flags, told):
    flags = dict(flags)
    file = sheet(tmp_path, text, encoding=flags.pop("encoding", "utf-8"))
    assert told in refusal(file, **flags)


def test_missing_files_are_counted_and_the_first_is_named(tmp_path):
    text = refusal(sheet(tmp_path, "file,kind\n{n}.png,{two}"))
    assert text.startswith(
        f"--data {tmp_path}/labels.csv: 12 of 12 images are missing, the first is {tmp_path}/0.png;"
    )
    (tmp_path / "windows.csv").write_text(
        "image,label\n" + "".join(f"images\\{n}.png,{n % 2}\n" for n in range(12))
    )
    assert r"images\0.png (there with / for each \: replace" in refusal(tmp_path / "windows.csv")
    sheet(tmp_path, "file,kind\nimages/{n}.png,{two}", ["images/12.png,0", "images/13.png,1"])
    assert len(read(tmp_path / "labels.csv")[0]) == 10  # as many as are allowed
    text = refusal(tmp_path / "labels.csv", max_broken_share=0.1)
    assert f"2 of 14 images are missing, the first is {tmp_path}/images/12.png" in text
    assert "--max_broken_share 0.1" in text
    for row in range(12):
        (tmp_path / f"images/{row}.png").write_text("version https://git-lfs.github.com/spec/v1")
    text = refusal(tmp_path / "labels.csv", max_broken_share=0.5)
    assert (
        "none of 14 images tried, all over its 14, can be read" in text and "not an image" in text
    )


# ---- the Hub


def test_a_name_that_is_no_path_is_asked_of_the_hub(tmp_path, monkeypatch):
    def load_dataset(name, config):
        asked.append((name, config))
        if name != "owner/name":
            raise datasets.exceptions.DatasetNotFoundError(
                f"Dataset '{name}' doesn't exist on the Hub"
            )
        return datasets.DatasetDict({"train": classified(12)})

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, val = read("owner/name:plain_text")
    check_rows(train)
    assert val.get_name(0) == f"owner/name:plain_text train[{val.rows[0]}]"
    assert "DatasetNotFoundError: Dataset 'owner/typo' doesn't exist on the Hub" in refusal(
        "owner/typo"
    )
    assert asked == [("owner/name", "plain_text"), ("owner/typo", None)]
    monkeypatch.chdir(tmp_path)
    draw_pets(Path("owner/name"))
    assert read("owner/name")[0].classes == ("cat", "dog")
    assert "did you mean name?" in refusal("owner/nme")
    assert "nothing is there" in refusal("./owner/typo") and "nothing is there" in refusal(
        "/owner/name"
    )
    assert len(asked) == 3  # never of a path


# ---- hostile tables


def test_hundreds_of_columns_are_read_at_once_and_named_in_part(tmp_path) -> None:
    """`datasets` makes all features each time: 200 columns took 15 s, 2,000 for ever."""
    images = [{"bytes": png(row), "path": None} for row in range(8)]
    for name, cells in {"bits": [0, 1] * 4, "texts": ["x"] * 8}.items():
        columns = {"image": images} | {f"c{number}": cells for number in range(500)}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with bounded(seconds=30, megabytes=4096):
        train, _ = read(
            tmp_path / "bits.parquet", label_column=",".join(f"c{number}" for number in range(500))
        )
        assert len(train.classes) == 500 and train.multi_label
        text = refusal(tmp_path / "texts.parquet")
    assert "c19 and 480 more could each be the label" in text and len(text) < 1_000
