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
from tests.harness.drawings import pets, picture, tree
from tests.harness.odd_files import bounded

datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def _in_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")


def read(data, seed=0, val_share=0.25, **options):
    return load(Spec(str(data), seed, val_share, **options))


def alone(data, split="", **options):
    return read(data, split=split, is_eval_only=True, **options)[1]


def refusal(data, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def names(source, root: Path) -> list[str]:
    return [os.path.relpath(source.name(index), root) for index in range(len(source))]


def reds(source) -> list[int]:
    return [source.image(index).getpixel((0, 0))[0] for index in range(len(source))]


def test_a_fixed_stratified_fifth_of_the_digits_is_held_out():
    from sklearn.datasets import load_digits

    train, val = read("digits", seed=0)
    shares = np.bincount(val.labels) / (np.bincount(train.labels) + np.bincount(val.labels))
    assert np.abs(shares - 0.2).max() < 0.005
    assert sorted([*train.rows, *val.rows]) == list(range(1797))
    assert train.classes == tuple("0123456789") and not train.multi_label
    image, row = val.image(5), val.rows[5]
    assert val.name(5) == f"digits[{row}]" and val.labels[5] == load_digits().target[row]
    small = np.asarray(image.resize((8, 8), Image.Resampling.BOX))[..., 0] / 255 * 16
    assert image.mode == "RGB" and np.abs(small - load_digits().images[row]).mean() < 1
    # Results compare across seeds.
    for same in (read("digits", seed=1, val_share=0.5)[1], alone("digits", is_training_data=True)):
        assert train.fingerprint != val.fingerprint == same.fingerprint
    assert alone("digits", "train").fingerprint == train.fingerprint


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
ALL, KEPT, OUT = "the folder", "75 % of the folder", "25 % held out of the folder"
AFTER_TREINO = "validação/; teste/: for --split test"
TWO_TRAINED, NAN = {"train/cat": 1, "train/dog": 1}, float("nan")
ALONE, HELD_OUT = {"is_eval_only": True}, {"is_eval_only": True, "is_training_data": True}

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
    train, val = read(tree(tmp_path, folders), **flags)
    assert (len(train), len(val), train.part, val.part) == (*counts, trained, evaluated)
    assert train.classes == val.classes and train.labels.dtype == np.int64
    for source in (train, val):
        for index, name in enumerate(names(source, tmp_path)):
            assert source.classes[source.labels[index]] in Path(name).parts
            assert source.image(np.int64(index)).getpixel((0, 0))[0] == int(Path(name).stem)


USUAL = """train,val,test TRAIN,VALID,TESTING training,validation,testing train_images,dev,test_images
    training_set,validation_set,test_set train2017,val2017,test2017 seg_train,eval,seg_test"""


def test_parts_are_known_by_their_usual_names():
    for names in (
        *(names.split(",") for names in USUAL.split()),
        ["Train Data", "Validation Data", "Test Data"],
    ):
        assert [*map(get_split_kind, names)] == ["train", "val", "test"]
    assert [*map(get_split_kind, ("trainval", "cat", "tram", "testament"))] == [
        "trainval",
        "",
        "",
        "",
    ]
    deep = {
        "train": ["/val/train/en/0.tar", "/val/extra/0.tar"],
        "val": ["/val/dev/en/0.tar", "/val/Val-1/fr/0.tar"],
    }
    assert group_by_split([*deep["train"], *deep["val"]]) == deep
    assert group_by_split(["/test/a.csv", "/test/b.csv"]) == {
        "train": ["/test/a.csv", "/test/b.csv"]
    }
    signed = {"train": ["https://h/a.tar?val"], "test": ["https://h/test_0.tar?val"]}
    assert group_by_split([*signed["train"], *signed["test"]]) == signed


NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
HEIC = dict.fromkeys((f"cat/{n}.HEIC" for n in range(9)), "")
TINY = {
    "val/images": 4,
    "val/val_annotations.txt": "".join(f"{n}.png\t{'dog' if n else 'cat'}\t0\n" for n in range(4)),
}
BAD_FOLDERS = [
    ({}, {}, "FOLDER: no class folders; images belong in one subfolder per class"),
    ({"cat": 1}, {}, "FOLDER: only the class folder cat/; "),
    (FLAT | {"emu": None}, {}, "FOLDER/emu: no images in this class folder; add some"),
    (FLAT, {"split": "test"}, "--split test: --data FOLDER has no such part; there is train"),
    (
        SPLIT | {"Val/emu": 1},
        {},
        "FOLDER/Val/emu: a class that FOLDER/train does not have; add it there",
    ),
    (SPLIT | {"Val/Cat": 1}, {}, "does not have; add it there; did you mean cat?"),
    ({"train/cat": 1, "train/dog": 1, "val": None}, {}, "FOLDER/val: no images to evaluate on"),
    (TWO_VAL, {}, "val/ and valid/ could each be the part val; keep one, or name it"),
    (BOTH, {}, "train/ and heldout/ both have the folders cat/ and dog/, so they seem to be parts"),
    (NO_TRAIN, {}, "no part to train on, only test, val; rename one to train"),
    (FLAT, {"label_column": "label"}, "is no table, so leave out --image_column"),
    (FLAT, {"val_share": 0.01}, "--val_share 0.01 of at most 12 images per class holds out none"),
    (
        FLAT | dict.fromkeys((f"cat/{n}.HEIC" for n in range(9)), ""),
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
    *(
        (FLAT, {"val_share": part}, f"--val_share {part}: must lie between 0 and 1")
        for part in (0, 1, NAN)
    ),
]


@pytest.mark.parametrize("folders, flags, text", BAD_FOLDERS)
def test_folder_refusals_name_the_folder_and_the_way_out(tmp_path, folders, flags, text):
    assert text.replace("FOLDER", str(tmp_path)) in refusal(tree(tmp_path, folders), **flags)


def test_images_are_known_by_their_content_and_others_named(tmp_path):
    tree(
        tmp_path, FLAT | {"cat/a.txt": "", "cat/b.heic": "", "dog/c.heic": "", "dog/d": "no image"}
    )
    for name in ("cat/0", "cat/1.jpg_large", "dog/2.jpg_large"):
        picture(tmp_path / "0.png", int(name[4]) + 20).rename(tmp_path / name)
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
    train, val = read(
        tree(tmp_path, {f"train/{NFD}": 2, "train/tea ": 2, f"val/{NFC}": 3, "val/tea": 4})
    )
    assert train.classes == val.classes == (NFD, "tea ") and val.class_counts.tolist() == [3, 4]


def test_tiny_imagenets_list_names_the_classes(tmp_path):
    _, val = read(tree(tmp_path, {"train/cat/images": 2, "train/dog/images": 2} | TINY))
    assert names(val, tmp_path) == [
        f"val/images/{n}.png" for n in range(4)
    ] and val.labels.tolist() == [0, 1, 1, 1]
    assert val.classes == ("cat", "dog") and reds(val) == [0, 1, 2, 3]


def test_a_list_with_letters_composed_otherwise_is_explained(tmp_path):
    tree(
        tmp_path,
        {
            NFD: 4,
            "list.csv": "file,kind\n" + "".join(f"{NFC}/{n}.png,{'ab'[n % 2]}\n" for n in range(4)),
        },
    )
    text = refusal(tmp_path / "list.csv")
    assert (
        f"4 of 4 images are missing, the first is {tmp_path}/{NFC}/0.png (there with its letters "
        "composed" in text
    )


def test_folders_that_all_classes_have_are_named(tmp_path):
    train, _ = read(
        tree(tmp_path, {f"{kind}/{site}": 4 for kind in ("cat", "dog") for site in ("in", "out")})
    )
    assert train.notes == (
        "the classes cat, dog each have in/ and out/ in them: if those are the classes, name the "
        "folders above train and val",
    )


# ---- groups and copies


def test_a_group_is_on_one_side_and_classes_keep_their_share(tmp_path):
    """20 patients with 1 to 8 images each, some in both classes: in folders, a CSV file and Parquet."""
    generator = np.random.default_rng(0)
    counts = {
        f"{kind}/p{n}": int(generator.integers(1, 5))
        for n in range(20)
        for kind in ("cat", "dog")[n % 3 == 0 :]
    }
    tree(tmp_path / "images", counts)
    rows = [
        f"images/{patient}/{n}.png,{patient.split('/')[0]},{patient[5:]}"
        for patient in counts
        for n in range(counts[patient])
    ]
    (tmp_path / "a.csv").write_text("\n".join(["file,kind,person", *rows]))
    pq.write_table(pa.csv.read_csv(tmp_path / "a.csv"), tmp_path / "a.parquet")
    for data, column in (("images", "folder"), ("a.csv", "person"), ("a.parquet", "person")):
        columns = {} if data == "images" else {"image_column": "file"}
        options = {"seed": 3, "group_column": column} | columns
        train, val = read(tmp_path / data, **options)
        held_out = {Path(name).parent.name for name in names(val, tmp_path)}
        assert held_out and not held_out & {
            Path(name).parent.name for name in names(train, tmp_path)
        }
        shares = val.class_counts / (train.class_counts + val.class_counts)
        assert val.part.endswith(f" by {column}")
        assert np.abs(shares - 0.25).max() < 0.07  # of 33 and 55 images, in groups of 1 to 8
        again = alone(tmp_path / data, is_training_data=True, **options)
        assert names(again, tmp_path) == names(val, tmp_path)
        assert names(read(tmp_path / data, **options | {"seed": 4})[1], tmp_path) != names(
            val, tmp_path
        )
    assert "--group_column who: is no column of --data" in refusal(
        tmp_path / "a.csv", group_column="who", label_column="kind", **columns
    )
    (tmp_path / "a.csv").write_text("\n".join(["file,kind,person", *rows, "images/x.png,cat,"]))
    assert f"row {len(rows)} has nothing in --group_column person" in refusal(
        tmp_path / "a.csv", group_column="person", **columns
    )


def test_rows_of_an_image_are_on_one_side(tmp_path):
    """Three rows of each image, by path or by bytes; under another name in a folder."""
    for number in range(12):
        picture(tmp_path / f"{number}.png", number)
    lines = [f"{n}.png,{'ab'[n % 2]}" for n in range(12)] * 3
    (tmp_path / "a.csv").write_text("\n".join(["file,kind", *lines]))
    labelled(list("ab") * 18).map(
        lambda _, row: {"image": png(row % 12)}, with_indices=True
    ).to_parquet(tmp_path / "b.parquet")
    tree(tmp_path / "c", {"a": 6, "b": 6})
    for number in range(6):
        for copy in "xy":
            shutil.copy(tmp_path / f"c/a/{number}.png", tmp_path / f"c/a/{copy}{number}.png")
    for data, copies, first in (
        ("a.csv", 24, "0.png"),
        ("b.parquet", 24, "train[12]"),
        ("c", 12, "a/x0.png"),
    ):
        train, val = read(tmp_path / data)
        assert not {*reds(train)} & {*reds(val)} or (data == "c" and len(train) + len(val) == 24)
        assert (
            f"{copies} of {len(train) + len(val)} images are copies, by path or bytes, of others"
            in train.notes[0]
        )
        assert train.notes[0].endswith(first)
        assert 0.15 <= len(val) / (len(train) + len(val)) <= 0.35
    originals = {(label, red) for label, red in zip(val.labels.tolist(), reds(val), strict=True)}
    assert not originals & {
        (label, red) for label, red in zip(train.labels.tolist(), reds(train), strict=True)
    }
    for kind in "ab":
        for number in range(6):
            picture(tmp_path / f"d/{kind}/{number}.png", 3)
    train, val = read(tmp_path / "d")
    assert (len(train), len(val)) == (
        8,
        4,
    ) and "of others on any side, since few images are differ" in train.notes[0]


def test_images_of_train_in_val_are_counted_or_refused(tmp_path):
    tree(tmp_path, {"train/cat": 4, "train/dog": 4, "val/cat": 4, "val/dog": 4})
    for number in range(5):
        shutil.copy(tmp_path / f"train/cat/{number % 4}.png", tmp_path / f"val/dog/{number}.png")
        if number == 1:
            _, val = read(tmp_path)
            text = "2 of 8 images are in train/, too, by path or bytes, first"
            assert val.notes == (f"{text} {tmp_path}/val/dog/0.png",)
            assert not alone(tmp_path).notes
    assert "val/: 5 of 9 images are in train/, too, by path or bytes, first" in refusal(tmp_path)
    assert len(read(tmp_path, split="train")[1]) == 8  # as it was asked for


def test_paths_of_nothing_are_refused(tmp_path, monkeypatch):
    assert f"--data {tmp_path}/missing: nothing is there; expected" in refusal(tmp_path / "missing")
    assert "nothing is there" in refusal(tmp_path / "missing.parquet")
    (tmp_path / "notes.txt").write_text("a,b")
    assert "a file of a kind that is not known; expected digits" in refusal(tmp_path / "notes.txt")
    assert "leave out --image_column" in refusal("digits", image_column="image")
    monkeypatch.setattr(
        os,
        "scandir",
        MagicMock(side_effect=PermissionError(13, "Permission denied", str(tmp_path))),
    )
    assert f"no permission to read {tmp_path}" in refusal(tmp_path)


def test_the_hold_out_is_stratified_and_stays_when_files_come(
    tmp_path,
):
    root = pets(tmp_path / "a", cats=20, dogs=20)
    train, val = read(root, seed=1)
    assert np.bincount(train.labels).tolist() == [15, 15] and np.bincount(val.labels).tolist() == [
        5,
        5,
    ]
    held_out = names(val, root)
    assert len({*names(train, root), *held_out}) == 40
    assert names(alone(root, seed=1, is_training_data=True), root) == held_out
    assert any(names(read(root, seed=seed)[1], root) != held_out for seed in (2, 3, 4))
    root, before = root.rename(tmp_path / "b"), {*held_out}
    assert {*names(read(root, seed=1)[1], root)} == before
    for index in range(20, 24):
        picture(root / f"cat/{index}.png", index)
        after = {*names(read(root, seed=1)[1], root)}
        assert len((before ^ after) - {f"cat/{index}.png"}) <= 1
        assert not any(name.startswith("dog") for name in before ^ after)
        before = after


def test_images_are_found_through_links_and_under_odd_names(tmp_path):
    """Never hidden ones. Links do not lead in circles, and a dangling one is a broken image."""
    pets(tmp_path / "store", cats=2, dogs=2)
    root = tmp_path / "data"
    for name in (
        "cat/UPPER.PNG cat/.hidden.png cat/.thumbnails/0.png .git/0.png beside.png cat/odd.png"
    ).split():
        picture(root / name)
    (root / "cat/notes.txt").write_text("no image")
    os.rename(root / "cat/odd.png", os.fsencode(root) + b"/cat/\xff\xfe.png")
    for link, to in {
        "dog": "store/dog",
        "cat/linked": "store/cat",
        "cat/circle": "data/cat",
        "cat/gone.png": "gone",
    }.items():
        (root / link).symlink_to(tmp_path / to)
    found = {
        name: (source, index)
        for source in read(root)
        for index, name in enumerate(names(source, root))
    }
    of_cats = ("UPPER", "\\xff\\xfe", "gone", "linked/0", "linked/1")
    assert {*map(str.lower, found)} == {f"cat/{name}.png".lower() for name in of_cats} | {
        "dog/0.png",
        "dog/1.png",
    }
    source, index = found.pop("cat/gone.png")
    with pytest.raises(BrokenImage, match="No such file"):
        source.image(index)
    assert all(source.image(index).size == (4, 3) for source, index in found.values())


def listed(root: Path) -> Path:
    """A list of absolute paths."""
    rows = [f"{path},{path.parent.name}\n" for path in sorted(root.rglob("*.png"))]
    (root / "list.csv").write_text("".join(["image,label\n", *rows]))
    return root / "list.csv"


@pytest.mark.parametrize("data_of", [Path, listed])
def test_a_fingerprint_is_of_the_content_not_of_the_place(tmp_path, data_of):
    def fingerprints(root: Path) -> list[str]:
        return [source.fingerprint for source in read(data_of(root))]

    first = fingerprints(pets(tmp_path / "a"))
    assert fingerprints(pets(tmp_path / "elsewhere/b")) == first
    changes = [
        lambda root: picture(root / "cat/99.png"),
        lambda root: (root / "cat/0.png").write_bytes(b"another size"),
        lambda root: (root / "cat/0.png").rename(root / "cat/zero.png"),
        lambda root: (root / "cat").rename(root / "cab"),
    ]
    for index, change in enumerate(changes):
        change(pets(tmp_path / str(index)))
        assert fingerprints(tmp_path / str(index)) != first, index


@pytest.mark.parametrize("run", ["runs/first", "first", "cat/mine", "train/runs/first"])
def test_runs_in_the_data_folder_are_no_data(tmp_path, run):
    """As `--data .` leaves them there, and as the present run has made its own folder before."""
    root = pets(tmp_path / "train").parent if run.startswith("train/") else pets(tmp_path)
    before = [source.fingerprint for source in read(root)]
    tree(
        root / run, {".lock": "", "log.txt": "", "pictures/first_batch.png": 3, "best/model.png": 4}
    )
    train, val = read(root)
    assert [train.fingerprint, val.fingerprint] == before and train.classes == ("cat", "dog")
    is_beside_classes = run in ("runs/first", "first")
    assert (
        f"left out: runs of these recipes in {run.split('/')[0]}/" in train.notes
    ) == is_beside_classes


def test_runs_that_recorded_whole_paths_still_know_their_data(tmp_path):
    def recorded_by_0_2_0(source) -> str:
        digest = hashlib.blake2b(
            json.dumps([source.classes, source.labels.shape]).encode(), digest_size=16
        )
        names = [source.name(index) for index in range(len(source))]
        for content in (source.labels.tobytes(), source.sizes.tobytes(), repr(names).encode()):
            digest.update(content)
        return digest.hexdigest()[:12]

    train, val = read(listed(pets(tmp_path / "a")))
    recorded = f"{recorded_by_0_2_0(train)}-{recorded_by_0_2_0(val)}"
    assert recorded != join_fingerprints(train, val)
    assert is_fingerprint(recorded, train, val) and is_fingerprint(
        join_fingerprints(train, val), train, val
    )
    assert not is_fingerprint(recorded, val, train) and not is_fingerprint("", train, val)


# ---- tables


def png(value: int, green: int = 1) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (value, green, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def table(count: int = 20, feature: object = None, **columns) -> datasets.Dataset:
    """Images whose first pixel's red is their row, others for another `count`; labels go round
    three classes.
    """
    columns = columns or {"label": [row % 3 for row in range(count)]}
    data = datasets.Dataset.from_dict(
        {"image": [png(row, count) for row in range(count)], **columns}
    )
    data = data.cast_column("image", datasets.Image())
    return data.cast_column("label", feature) if feature else data


def labelled(labels: list, feature: object = None) -> datasets.Dataset:
    return table(len(labels), feature, label=labels)


def classified(count: int = 20, class_names="abc") -> datasets.Dataset:
    return table(count, datasets.ClassLabel(names=[*class_names]))


def saved(root: Path, **splits: datasets.Dataset) -> Path:
    datasets.DatasetDict(splits).save_to_disk(root)
    return root


def check_rows(*sources):
    for source in sources:
        assert reds(source) == source.rows.tolist() and source.labels.tolist() == [
            row % 3 for row in source.rows
        ]
        assert (
            source.labels.dtype == np.int64
            and not source.multi_label
            and len(source.fingerprint) == 32
        )


def test_saved_data_and_parquet_hold_out_the_same_rows(tmp_path):
    data, found = classified(30), []
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    for half in range(2):
        data.shard(2, half, contiguous=True).to_parquet(tmp_path / f"folder/{half}.parquet")
    for place in ("saved", "folder", "folder/*.parquet"):
        train, val = read(tmp_path / place)
        assert train.classes == val.classes == ("a", "b", "c")
        check_rows(train, val)
        assert sorted([*train.rows, *val.rows]) == list(range(30))
        assert np.bincount(val.labels).tolist() == [3, 3, 3]  # a quarter of 10, rounded up
        assert val.name(0) == f"{tmp_path / place} train[{val.rows[0]}]"
        found.append((val.rows.tolist(), train.fingerprint, val.fingerprint))
    assert found == found[:1] * 3
    assert read(tmp_path / "saved", seed=1)[1].rows.tolist() != found[0][0]


def test_a_split_to_evaluate_on_is_used_as_it_is(tmp_path):
    splits = {"train": classified(9), "Dev": classified(6)}
    saved(tmp_path / "saved", **splits)
    for name, split in splits.items():
        for file in (f"folder/data/{name}-00000-of-00001.parquet", f"nested/{name}/0000.parquet"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            split.to_parquet(tmp_path / file)
    for place in ("saved", "folder", "nested"):
        train, val = read(tmp_path / place, val_share=7)  # not asked for, so not judged
        part = "Dev" if place == "saved" else "val"
        assert (len(train), len(val), val.name(5)) == (9, 6, f"{tmp_path / place} {part}[5]")
        check_rows(train, val)
    assert (alone(tmp_path / "saved", "dev").part, len(alone(tmp_path / "saved"))) == (
        "split Dev",
        6,
    )
    splits["train"].to_parquet(tmp_path / "test.parquet")
    assert [
        len(alone(tmp_path / "test.parquet", is_training_data=held_out))
        for held_out in (False, True)
    ] == [9, 3]


def test_lists_of_labels_are_several_labels_of_an_image(tmp_path):
    tags = [[0], [0, 2], [], [1, 2], [2]]
    named = datasets.List(datasets.ClassLabel(names=["x", "y", "z", "never"]))
    labelled(tags, named).save_to_disk(tmp_path / "named")
    labelled([["xyz"[tag] for tag in row] for row in tags]).save_to_disk(tmp_path / "text")
    for place, expected in {"named": ("x", "y", "z", "never"), "text": ("x", "y", "z")}.items():
        for source, count in zip(read(tmp_path / place, val_share=0.4), (3, 2), strict=True):
            assert source.multi_label and source.classes == expected
            assert source.labels.dtype == bool and source.labels.shape == (count, len(expected))
            assert [np.flatnonzero(row).tolist() for row in source.labels] == [
                tags[row] for row in source.rows
            ]
    mixed = MANY.select_columns(["image", "fine"]).add_column("kind", [0, 1, 0, 1])
    saved(tmp_path / "mixed", train=mixed.cast_column("kind", TWO))
    assert read(tmp_path / "mixed", val_share=0.5)[0].classes == ("a", "b")


def test_images_may_be_bytes_paths_or_a_pair(tmp_path):
    paths = [
        str(picture(tmp_path / f"images/{row}.png", row).relative_to(tmp_path)) for row in range(6)
    ]
    pairs = [{"bytes": png(row), "path": f"{row}.png"} for row in range(6)]
    for column, cells in {"content": [*map(png, range(6))], "image": pairs, "file": paths}.items():
        columns = {column: cells, "label": [row % 3 for row in range(6)]}
        pq.write_table(pa.table(columns), tmp_path / f"{column}.parquet")
        train, val = read(tmp_path / f"{column}.parquet", val_share=0.5)
        check_rows(train, val)
        assert train.fingerprint != val.fingerprint


def test_a_broken_cell_is_one_broken_image(tmp_path):
    content = {"image": [png(0), b"no image", None, png(3)[:30], png(4), b""], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(content).cast_column("image", datasets.Image()).to_parquet(
        tmp_path / "a.parquet"
    )
    pq.write_table(pa.table(content), tmp_path / "b.parquet")
    for place in ("a.parquet", "b.parquet"):
        source, broken = alone(tmp_path / place), {}
        for row in range(6):
            try:
                assert source.image(row).getpixel((0, 0))[0] == row
            except BrokenImage as error:
                broken[row] = str(error)
        assert sorted(broken) == [1, 2, 3, 5] and broken[2] == "the row has no image"


def test_table_fingerprint_follows_images_labels_and_classes(tmp_path):
    larger = (
        classified(12).select([11]).map(lambda row: {"image": Image.effect_noise((64, 64), 50)})
    )
    other_order, other_image = (
        classified(12).select([*range(1, 12), 0]),
        datasets.concatenate_datasets([classified(11), larger]),
    )
    variants = classified(12), other_order, classified(12, "abz"), other_image, classified(12)
    found = [
        tuple(each.fingerprint for each in read(saved(tmp_path / str(place), train=data)))
        for place, data in enumerate(variants)
    ]
    assert len({*found}) == 4 and found[0] == found[4]


TWO = datasets.ClassLabel(names=["a", "b"])
MANY = table(4, fine=[0, 1, 2, 3], coarse=[0, 0, 1, 1], score=[0.1, 0.2, 0.3, 0.4])
MANY = MANY.add_column("second", [png(row) for row in range(4)]).cast_column(
    "second", datasets.Image()
)

SECOND, SCORE = {"image_column": "second"}, {"image_column": "image", "label_column": "second"}
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
        paths = [picture(tmp_path / f"{row}.png", row).name for row in range(8)]
        lines = [f"{path},{label}" for path, label in zip(paths, labels, strict=True)]
        (tmp_path / "same.csv").write_text("\n".join(["image,label", *lines]))
        of_csv = read(tmp_path / "same.csv")
        assert of_csv[0].classes == classes
        assert [part.labels.tolist() for part in of_csv] == [
            train.labels.tolist(),
            val.labels.tolist(),
        ]


def test_brackets_in_a_path_stand_for_themselves(tmp_path):
    root = tmp_path / "shells [final]"
    (root / "data [1]").mkdir(parents=True)
    for part in ("train", "val"):
        classified({"train": 9, "val": 8}[part]).to_parquet(root / f"data [1]/{part}.parquet")
        for label, value in (("a", 0), ("b", 50)):
            picture(root / f"{part}_{label}.png", value + (part == "val"))
        (root / f"{part}.csv").write_text(f"image,label\n{part}_a.png,a\n{part}_b.png,b\n")
    for place in ("data [1]", "data [1]/*.parquet", "data [1]/[tv]*.parquet", "*.csv"):
        train, val = read(root / place)
        assert (train.part, val.part) == ("split train", "split val"), place
    assert len(read(root / "data [1]/val.parquet")[0]) == 5
    assert len(alone(root / "val.csv")) == 2


def test_a_test_part_without_labels_does_not_block_training(tmp_path):
    for root in (tmp_path / "parquet", tmp_path / "csv"):
        root.mkdir()
    classified(9).to_parquet(tmp_path / "parquet/train.parquet")
    classified(9).remove_columns("label").to_parquet(tmp_path / "parquet/test.parquet")
    for number in range(8):
        picture(tmp_path / f"csv/{number}.png", number)
    lines = [f"{number}.png,{10 if number % 2 else 1}\n" for number in range(8)]
    (tmp_path / "csv/train.csv").write_text("image,label\n" + "".join(lines))
    (tmp_path / "csv/test.csv").write_text("image\n0.png\n")
    for place in ("parquet", "csv/*.csv"):
        train, val = read(tmp_path / place)
        assert train.part == "75 % of split train" and len(train) + len(val) in (8, 9)
        assert "split test has no column label, which train has" in refusal(
            tmp_path / place, split="test"
        )


def test_damaged_tables_are_refused_in_one_line(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    assert "can't be read as a Hugging Face data set: " in refusal(tmp_path / "torn.parquet")
    beyond = pa.table({"image": [png(0), png(1)], "label": pa.array([0, 2], pa.int64())})
    info = datasets.Features(
        {"image": datasets.Value("binary"), "label": TWO}
    ).arrow_schema.metadata
    pq.write_table(beyond.replace_schema_metadata(info), tmp_path / "beyond.parquet")
    assert "row 1 has label 2 in column label, but the 2 " in refusal(tmp_path / "beyond.parquet")


# ---- CSV


def sheet(root: Path, text: str, rows: list[str] = (), encoding: str = "utf-8") -> Path:
    """A CSV file beside images whose first pixel's red is their number `n`.

    `text` is the first line, and the format of one line for each image; `rows` are further lines.
    """
    for number in range(12):
        picture(root / f"images/{number}.png", number)
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
    assert val.name(0) == f"{tmp_path}/images/{reds(val)[0]}.png"


def test_a_column_split_or_several_files_are_parts(tmp_path):
    parts = ["Training"] * 6 + ["dev"] * 4 + ["Test"] * 2
    rows = [f"images/{n}.png,{n % 2},{part}" for n, part in enumerate(parts)]
    pq.write_table(
        pa.csv.read_csv(sheet(tmp_path, "file,kind,Split", rows)), tmp_path / "labels.parquet"
    )
    for place in (tmp_path / "labels.csv", tmp_path / "labels.parquet"):
        train, val = read(place, image_column="file", label_column="kind")
        assert (reds(train), reds(val)) == (list(range(6)), list(range(6, 10)))
        assert val.part == "split dev; split Test: for --split test"
        assert reds(read(place, split="test")[1]) == [10, 11] == reds(alone(place, "test"))
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
        f"{picture(tmp_path / f'{row}.png', row).name};{'ab'[row % 2]}{form}" for row in range(8)
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
        picture(tmp_path / f"train_images/{number}.png", number)
        picture(tmp_path / f"train_images/{number:04}a.jpg", 20 * number)
    (tmp_path / "train_images/0.txt").touch()
    for name, form in {"numbers": "{n}", "texts": "{n:04}a", "blank": ""}.items():
        lines = [f"{form.format(n=n)},{n % 2}" for n in range(12)]
        lines[0] = f"{form.format(n=0)},0"
        (tmp_path / f"{name}.csv").write_text("\n".join(["id_code,diagnosis", *lines]))
    for name, suffix in (("numbers", ".png"), ("texts", ".jpg")):
        train, val = read(tmp_path / f"{name}.csv", image_column="id_code")
        assert train.notes == (f"images: {tmp_path}/train_images/*{suffix}",)
        found = [
            Path(source.name(index)).stem for source in (train, val) for index in range(len(source))
        ]
        assert len(set(found)) == 12 and not len(train.missing)
    assert "12 of 12 images are missing" in refusal(tmp_path / "blank.csv", image_column="id_code")
    assert "no image column found; name it with --image_column" in refusal(tmp_path / "texts.csv")
    picture(tmp_path / "small/0.png")
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
    assert val.name(0) == f"owner/name:plain_text train[{val.rows[0]}]"
    assert "DatasetNotFoundError: Dataset 'owner/typo' doesn't exist on the Hub" in refusal(
        "owner/typo"
    )
    assert asked == [("owner/name", "plain_text"), ("owner/typo", None)]
    monkeypatch.chdir(tmp_path)
    pets(Path("owner/name"))
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
