"""Box formats: what the four numbers of a box mean."""

import numpy as np

from common.errors import Refused

BOX_FORMATS = ("xywh", "xyxy", "cxcywh")  # left top width height; left top right bottom; centre width height


def as_xywh(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """[M, 4] in a box format -> left, top, width, height."""
    first, last = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return np.concatenate([first, last - first], axis=1)
    return boxes if box_format == "xywh" else np.concatenate([first - last / 2, last], axis=1)


def only_format(title: str, boxes: np.ndarray, sizes: np.ndarray) -> str:
    """xywh or xyxy, if the other is impossible. Raises `Refused` if both or neither are possible."""
    if not len(boxes):
        return "xywh"  # as good as any: that there are no boxes is refused elsewhere
    if boxes.max() <= 1:
        raise Refused(f"--data {title}: boxes are in shares of the image (0 to 1); give them in pixels")
    is_readable = (sizes > 0).all(axis=1)
    could_be = []
    if (boxes[:, :2] + boxes[:, 2:] <= sizes + 1)[is_readable].all():
        could_be.append("xywh")
    if (boxes[:, 2:] >= boxes[:, :2]).all():
        could_be.append("xyxy")
    if len(could_be) != 1:
        problem = "could be either" if could_be else "fit neither"
        raise Refused(
            f"--data {title}: the boxes {problem} of xywh (left, top, width, height) and xyxy (left, top, right, bottom); "
            f"say which with --box_format, one of {', '.join(BOX_FORMATS)}"
        )
    return could_be[0]
