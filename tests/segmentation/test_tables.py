"""Tables with a column of images and one of masks are read as the same files in folders."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.data.images import BrokenImage
from common.errors import Refused
from common.segmentation.masks import IGNORED
from common.segmentation.sources import Spec, count_class_pixels, load, load_data
from recipes import seg

NUM_ROWS = 12
CLASSES = ("ground", "leaf", "sky")

datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def _in_the_test_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")


def read(data: Path | str, **options) -> tuple:
    return load(Spec(str(data), **{"seed": 0, "val_share": 0.25} | options))


def refusal(data: Path | str, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def draw_row(row: int) -> tuple[Image.Image, Image.Image]:
    """An image, whose red is the row, and its mask, of a size of their own."""
    ids = np.full((4 + row % 3, 6 + row % 2), row % 3, np.uint8)
    ids[0] = 255
    ids[1, 0] = (row + 1) % 3
    pixels = np.stack([np.full_like(ids, row), ids, ids], axis=2)
    return Image.fromarray(pixels), Image.fromarray(ids)


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def replace(cells: list, row: int, cell: bytes | None) -> list:
    return cells[:row] + [cell] + cells[row + 1 :]


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with images/, masks/ and classes.txt."""
    root = tmp_path / "files"
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for row in range(NUM_ROWS):
        image, mask = draw_row(row)
        image.save(root / f"images/{row:02}.png")
        mask.save(root / f"masks/{row:02}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES))
    return root


def build_cells(root: Path) -> dict[str, list]:
    images = [file.read_bytes() for file in sorted((root / "images").iterdir())]
    masks = [file.read_bytes() for file in sorted((root / "masks").iterdir())]
    return {"image": images, "annotation": masks}


def build_saved(root: Path, **columns) -> datasets.Dataset:
    """As pictures in a Hugging Face data set; `columns` are further ones, or replace these."""
    table = datasets.Dataset.from_dict(build_cells(root) | columns)
    for column in ("image", "annotation"):
        table = table.cast_column(column, datasets.Image())
    return table


def write(form: str, root: Path, folder: Path) -> str:
    """The same rows in another form, in `folder`; returns what --data names."""
    cells = build_cells(root)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    if form == "saved":
        build_saved(root).save_to_disk(folder)
    elif form == "saved splits":
        datasets.DatasetDict({"train": build_saved(root)}).save_to_disk(folder)
    elif form == "pictures in parquet":
        build_saved(root).to_parquet(folder / "a.parquet")
    elif form == "bytes in parquet":
        table = {"seg": cells["annotation"], "photo": cells["image"]}
        pq.write_table(pa.table(table), folder / "a.parquet")
    elif form == "csv":
        lines = ["photo,photo_gt,caption"]
        for row in range(NUM_ROWS):
            lines.append(f"../files/images/{row:02}.png,../files/masks/{row:02}.png,a length")
        (folder / "a.csv").write_text("\n".join(lines))
        return str(folder / "a.csv")
    elif form == "image folder":
        lines = []
        for row in range(NUM_ROWS):
            for kind, column in (("img", "image"), ("ids", "annotation")):
                (folder / f"{kind}{row:02}.png").write_bytes(cells[column][row])
            names = {"file_name": f"img{row:02}.png", "mask_file_name": f"ids{row:02}.png"}
            lines.append(json.dumps(names))
        (folder / "metadata.jsonl").write_text("\n".join(lines))
    return str(folder)


FORMS = (
    "saved",
    "saved splits",
    "pictures in parquet",
    "bytes in parquet",
    "csv",
    "image folder",
)


def read_row(source, index: int) -> tuple[int, list, list]:
    """The row, the pixels and the mask of an image, as training reads them."""
    pair = source.load_pair(index, index)
    pixels = pair.picture.decode()
    return int(pixels[0, 0, 0]), pixels.tolist(), pair.mask.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_tables_of_any_form_have_the_pixels_and_masks_of_files(form, files, tmp_path) -> None:
    expected = {}
    for source in read(files):
        expected |= {read_row(source, i)[0]: read_row(source, i) for i in range(len(source))}
    folder = tmp_path / "table"
    folder.mkdir()
    data = write(form, files, folder)
    train, val = load_data(seg.Config(data=data, val_share=0.25))
    assert train.classes == val.classes == CLASSES
    assert val.split_text == "25 % held out of all rows"
    rows = {}
    for source in (train, val):
        for i in range(len(source)):
            row = read_row(source, i)
            rows[row[0]] = row
            assert (source.load_mask(i) == row[2]).all()
    assert rows == expected and len(train) == 9 and len(val) == 3
    assert rows[5][2][0] == [IGNORED] * 7
    again, _ = read(data)
    assert again.fingerprint == train.fingerprint != val.fingerprint
    first = train.get_name(0)
    if form == "csv":
        assert Path(first).name == f"{read_row(train, 0)[0]:02}.png"
    elif form != "image folder":
        assert first == f"{data} train[{read_row(train, 0)[0]}]"


def test_splits_are_those_of_the_table(files, tmp_path) -> None:
    whole = build_saved(files)
    splits = {"train": whole.select(range(7)), "validation": whole.select(range(7, 12))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/classes.txt").write_text("\n".join(CLASSES))
    train, val = read(tmp_path / "saved")
    assert [read_row(train, i)[0] for i in range(7)] == list(range(7))
    assert [read_row(val, i)[0] for i in range(5)] == list(range(7, 12))
    assert val.split_text == "split validation"
    _, train = read(tmp_path / "saved", split="train", is_eval_only=True)
    assert len(train) == 7


def test_groups_are_held_out_together(files, tmp_path) -> None:
    people = [f"p{row // 3}" for row in range(NUM_ROWS)]
    build_saved(files, person=people).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/classes.txt").write_text("\n".join(CLASSES))
    train, val = read(tmp_path / "saved", group_column="person")
    sides = [{people[read_row(s, i)[0]] for i in range(len(s))} for s in (train, val)]
    assert len(sides[0]) == 3 and len(sides[1]) == 1 and not sides[0] & sides[1]


def test_zero_may_mean_no_label(files, tmp_path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    data = write("saved", files, folder)
    (folder / "classes.txt").write_text("leaf\nsky")
    (files / "classes.txt").write_text("leaf\nsky")
    of_table = sum(count_class_pixels(source) for source in read(data, ignore_zero=True))
    of_files = sum(count_class_pixels(source) for source in read(files, ignore_zero=True))
    assert of_table.tolist() == of_files.tolist()
    train, _ = read(data, ignore_zero=True)
    shift = {255: IGNORED, 0: IGNORED, 1: 0, 2: 1}
    for i in range(len(train)):
        row, _, mask = read_row(train, i)
        ids = np.asarray(draw_row(row)[1]).tolist()
        assert mask == [[shift[number] for number in line] for line in ids]
    assert "the mask has the id 2, and there are 2 classes, 0 to 1" in refusal(data)


def test_the_fingerprint_follows_both_columns_and_the_classes(files, tmp_path) -> None:
    cells = build_cells(files)
    row = 4
    pixels = Image.effect_noise(draw_row(row)[0].size, 50)
    noise = encode(pixels)
    noise_mask = encode(pixels.point(lambda value: value % 3))
    variants = {
        "original": {},
        "same": {},
        "another image": {"image": replace(cells["image"], row, noise)},
        "another mask": {"annotation": replace(cells["annotation"], row, noise_mask)},
        "other classes": {},
    }
    fingerprints = {}
    for name, columns in variants.items():
        folder = tmp_path / name
        build_saved(files, **columns).save_to_disk(folder)
        names = ("a", "b", "c") if name == "other classes" else CLASSES
        (folder / "classes.txt").write_text("\n".join(names))
        fingerprints[name] = read(folder, split="all", is_eval_only=True)[1].fingerprint
    assert fingerprints.pop("same") == fingerprints["original"]
    assert len(set(fingerprints.values())) == 4


# ---- columns


def save_columns(folder: Path, root: Path, *names: str) -> Path:
    """A saved table of the image under the first of `names`, and of the mask under the others."""
    cells = build_cells(root)
    columns = {names[0]: cells["image"], "caption": ["a.b"] * NUM_ROWS, "score": [0.5] * NUM_ROWS}
    table = datasets.Dataset.from_dict(columns | dict.fromkeys(names[1:], cells["annotation"]))
    for name in names:
        table = table.cast_column(name, datasets.Image())
    table.save_to_disk(folder)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder


@pytest.mark.parametrize(
    "names, flags",
    [
        (("photo", "Mask"), {}),
        (("pixel_values", "labels"), {}),
        (("image", "segmentation"), {}),
        (("length", "gt_fine"), {}),
        (("image", "target"), {"mask_column": "target"}),
        (("image", "mask_a", "mask_b"), {"mask_column": "mask_b", "image_column": "image"}),
        (("labelled", "mask"), {"mask_column": "mask"}),
    ],
)
def test_columns_are_found_by_type_and_name_or_named(names, flags, files, tmp_path) -> None:
    train, val = read(save_columns(tmp_path / "saved", files, *names), **flags)
    assert len(train) + len(val) == NUM_ROWS
    for index in range(len(train)):
        row, _, mask = read_row(train, index)
        ids = np.asarray(draw_row(row)[1]).astype(int)
        assert mask == np.where(ids == 255, IGNORED, ids).tolist()


@pytest.mark.parametrize(
    "names, flags, message",
    [
        (
            ("image", "mask", "labels"),
            {},
            "mask, labels could each be the mask; name it with --mask_column NAME (columns: image (",
        ),
        (("image", "target"), {}, "no mask column found; name it with --mask_column NAME (col"),
        (("mask",), {}, "no image column found; name it with --image_column NAME (columns: mask ("),
        (
            ("left", "right", "mask"),
            {},
            "left, right could each be the image; name it with --image_column NAME",
        ),
        (("image", "mask"), {"mask_column": "no"}, "--mask_column no: is no column of --data"),
        (
            ("image", "mask"),
            {"mask_column": "score"},
            "--mask_column score: can't be the mask column of --data",
        ),
        (
            ("image", "mask"),
            {"mask_column": "image", "image_column": "image"},
            "--image_column image: can't be the image column of --data",
        ),
    ],
    ids=["two masks", "no mask", "no image", "two images", "unknown", "numbers", "the same"],
)
def test_columns_that_are_not_unique_are_listed_with_the_flag(
    names, flags, message, files, tmp_path
) -> None:
    text = refusal(save_columns(tmp_path / "saved", files, *names), **flags)
    assert message in text and "caption (string), score (double)" in text


@pytest.mark.parametrize("flag", ["image_column", "mask_column", "class_names"])
def test_flags_of_tables_are_refused_for_other_data(flag, files) -> None:
    message = "is no table, so leave out --image_column, --mask_column and --class_names"
    assert message in refusal(files, **{flag: "x"})
    with pytest.raises(Refused, match=message):
        load_data(seg.Config(data="digits", **{flag: "x"}))


# ---- classes


def test_names_of_classes_lie_beside_the_table_or_are_named(files, tmp_path) -> None:
    data = save_columns(tmp_path / "saved", files, "image", "mask")
    (data / "classes.txt").unlink()
    message = "saved: the classes of the masks have no names; write classes.txt there, a name per"
    assert message in refusal(data) and "--class_names FILE will do" in refusal(data)
    (data / "classes.json").write_text(json.dumps(CLASSES))
    assert read(data)[0].classes == CLASSES
    listed = tmp_path / "names"
    listed.write_text("a\nb\nc\n")
    by_id = tmp_path / "id2label.json"
    by_id.write_text(json.dumps({str(i): name for i, name in enumerate(CLASSES)}))
    assert read(data, class_names=str(listed))[0].classes == ("a", "b", "c")
    assert read(data, class_names=str(by_id))[0].classes == CLASSES
    missing = refusal(data, class_names=str(tmp_path / "none.txt"))
    assert "none.txt: the classes of the masks have no names" in missing


# ---- what can't be read


def test_a_row_without_a_mask_is_refused(files, tmp_path) -> None:
    masks = build_cells(files)["annotation"]
    build_saved(files, annotation=replace(masks, 7, None)).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/classes.txt").write_text("\n".join(CLASSES))
    message = "1 of 12 images have no mask, first "
    assert f"{message}{tmp_path}/saved train[7]; add it" in refusal(tmp_path / "saved")
    (tmp_path / "table").mkdir()
    csv = write("csv", files, tmp_path / "table")
    (files / "masks/03.png").unlink()
    assert message in refusal(csv) and "masks/03.png; add it" in refusal(csv)


def test_an_image_that_cant_be_read_is_one_broken_image(files, tmp_path) -> None:
    broken = replace(build_cells(files)["image"], 7, b"no image")
    build_saved(files, image=broken).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/classes.txt").write_text("\n".join(CLASSES))
    _, source = read(tmp_path / "saved", split="all", is_eval_only=True)
    with pytest.raises(BrokenImage, match="not an image"):
        source.load_pair(7, 7)
    assert (source.load_mask(7)[1, 1:] == 1).all()
    (tmp_path / "table").mkdir()
    csv = write("csv", files, tmp_path / "table")
    (files / "images/07.png").unlink()
    assert "1 of 12 images are missing, the first is" in refusal(csv, max_broken_share=0.02)
    train, val = read(csv, max_broken_share=0.1)
    assert len(train) + len(val) == NUM_ROWS


def test_a_mask_that_does_not_fit_is_named_by_its_row(files, tmp_path) -> None:
    turned = encode(draw_row(7)[1].rotate(90, expand=True))
    masks = replace(build_cells(files)["annotation"], 7, turned)
    build_saved(files, annotation=masks).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/classes.txt").write_text("\n".join(CLASSES))
    message = (
        "saved train[7]: is 7 x 5 pixels large (after its EXIF rotation), its mask 5 x 7; make"
    )
    assert message in refusal(tmp_path / "saved")


def test_ids_name_images_and_masks_in_folders_beside_the_table(files) -> None:
    lines = ["id,mask_id"]
    for row in range(NUM_ROWS):
        (files / f"masks/{row:02}.png").rename(files / f"masks/m{row:02}.png")
        lines.append(f"{row:02},m{row:02}")
    (files / "a.csv").write_text("\n".join(lines))
    train, _ = read(files / "a.csv", image_column="id", mask_column="mask_id")
    assert train.notes == (f"images: {files}/images/*.png", f"images: {files}/masks/*.png")
    for index in range(len(train)):
        row, _, mask = read_row(train, index)
        assert mask[1][1] == row % 3
