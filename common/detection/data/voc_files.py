"""Reader of folders in the format of Pascal VOC.

JPEGImages/NAME.jpg, Annotations/NAME.xml, and lists of names in ImageSets/Main. Source: Everingham et al., "The Pascal
Visual Object Classes Challenge", 2010, and its development kit.
"""

import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from common.data.images import SUFFIXES
from common.data.source import name_of
from common.data.splits import kind_of
from common.detection.data.annotated_files import AnnotatedFiles, read_files, text_of
from common.detection.data.box_checks import FoundBoxes
from common.detection.data.box_formats import as_xywh
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import SMALL, OddFile, read_bytes

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def find_voc(root: Path) -> Path | None:
    """The folder that has Annotations/ and JPEGImages/: `root`, or the only such folder of a development kit."""
    found = [
        folder for folder in (root, *sorted(root.glob("VOC*")), *sorted(root.glob("VOCdevkit/VOC*"))) if _is_voc(folder)
    ]
    if len(found) > 1:
        raise Refused(f"{root}: {', '.join(folder.name for folder in found)} are data sets of their own; name one")
    return found[0] if found else None


def _is_voc(folder: Path) -> bool:
    return (folder / "Annotations").is_dir() and (folder / "JPEGImages").is_dir()


def voc_parts(root: Path) -> dict[str, Path | None]:
    """The lists of images in ImageSets/Main by name, such as train, val, trainval, test; if there are none, one part of all."""
    lists = {file.stem: file for file in sorted((root / "ImageSets/Main").glob("*.txt"))}
    of_classes = {
        name for name in lists if kind_of(name.rpartition("_")[2]) and not kind_of(name)
    }  # aeroplane_train.txt
    if any(map(kind_of, lists)):
        return {name: file for name, file in lists.items() if name not in of_classes}
    return {"train": None}


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def read_voc(root: Path, names_file: Path | None, train: AnnotatedFiles | None, stamps: Stamps) -> AnnotatedFiles:
    """The images of a list, or all of them.

    Classes are those of `train`, or else the sorted names found. Objects marked difficult become `crowd`: neither learnt nor
    asked for. Corners are of pixels counted from 1, unless one is 0. Raises `Refused`.
    """
    stamps.take_files([root / "Annotations", root / "JPEGImages", *([names_file] if names_file else [])])
    if names_file:
        names = [line.split()[0] for line in text_of(names_file).splitlines() if line.strip()]
    else:
        names = sorted(file.stem for file in (root / "Annotations").glob("*.xml"))
    files = {os.path.splitext(name)[0]: name for name in sorted(os.listdir(root / "JPEGImages")) if _is_image(name)}
    stamps.take(f"{root}/Annotations", pa.array([os.fsencode(f"{name}.xml") for name in names], pa.large_binary()))
    sizes, rows, corners, labels, difficult = [], [], [], [], []
    for row, name in enumerate(names):
        size, objects = _read_xml(root / "Annotations" / f"{name}.xml")
        sizes.append(size)
        for label, box, is_difficult in objects:
            rows.append(row)
            corners.append(box)
            labels.append(label)
            difficult.append(is_difficult)
    classes = tuple(sorted(set(labels))) if train is None else train.classes
    ids = {name: place for place, name in enumerate(classes)}
    for place in (place for place, label in enumerate(labels) if label not in ids):
        file = root / "Annotations" / f"{names[rows[place]]}.xml"
        raise Refused(f"{file}: a box of the class {labels[place]}, which no training image has; add one, or remove it")
    boxes = np.array(corners, np.float64).reshape(-1, 4)
    if not (boxes == 0).any():
        boxes[:, :2] -= 1  # pixels are counted from 1, the last one included
    paths = pa.array([os.fsencode(files.get(name, f"{name}.jpg")) for name in names], pa.large_binary())
    folder = f"{root}/JPEGImages"
    found = FoundBoxes(
        title=f"{root} {names_file.stem if names_file else 'train'}",
        classes=classes,
        category_ids=np.arange(len(classes)),
        image_ids=np.arange(len(names)),
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        rows=np.array(rows, np.int64),
        boxes=as_xywh(boxes, "xyxy"),
        labels=np.array([ids[label] for label in labels], np.int64),
        crowd=np.array(difficult, bool),
        areas=np.full(len(boxes), np.nan),
        name=lambda row: name_of(folder, paths, row),
    )
    return read_files(found, folder, paths, stamps)


def _read_xml(file: Path) -> tuple[tuple[int, int], list[tuple[str, list[float], bool]]]:
    """Width and height (0 if unknown) and the objects of a file: class, corners, and whether each is difficult."""
    try:
        content = read_bytes(file, SMALL)
        if b"<!ENTITY" in content:  # a few nested entities can expand to gigabytes
            raise Refused(f"{file}: defines entities, which annotations have no need of; remove them")
        tree = ElementTree.fromstring(content)
    except FileNotFoundError:
        raise Refused(f"{file}: missing, but its image is listed; add it, or take the image from the list") from None
    except OddFile as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except ElementTree.ParseError as error:
        raise Refused(f"{file}: not readable as XML: {error}") from None
    try:
        size = tuple(int(float(tree.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        if not all(0 <= side < 2**31 for side in size):
            raise Refused(f"{file}: a size of {size[0]} x {size[1]} pixels; correct it")
        objects = []
        for entry in tree.iter("object"):
            name, box = entry.findtext("name"), [entry.findtext(f"bndbox/{corner}") for corner in _CORNERS]
            if not name or None in box:
                raise Refused(f"{file}: an object lacks its name or one of bndbox/{', '.join(_CORNERS)}")
            is_difficult = (entry.findtext("difficult") or "0").strip() == "1"
            objects.append((name.strip(), [float(corner) for corner in box], is_difficult))
    except (ValueError, OverflowError) as error:
        raise Refused(f"{file}: a size or corner is no number: {error}") from None
    return size, objects
