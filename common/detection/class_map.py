"""The map of class names that `--init_classes` gives: classes of the data that the weights call otherwise."""

from collections.abc import Sequence

from common.config.origin import find_indices, format_names
from common.errors import Refused


def parse_class_map(text: str, class_names: Sequence[str]) -> dict[str, str]:
    """The pairs in a text such as "mug=cup,sofa=couch": class of the data -> class of the weights.

    Raises `Refused` for a pair without one of its sides, and for a name that is none of
    `class_names`, those of the data.
    """
    class_map = {}
    for pair in text.split(","):
        if not pair:
            continue
        data_name, _, weights_name = pair.partition("=")
        data_name = data_name.strip()
        weights_name = weights_name.strip()
        if not data_name or not weights_name:
            raise Refused(
                f"--init_classes {text:.100}: must be OWN=THEIRS, joined by commas, such as "
                "mug=cup,sofa=couch"
            )
        (index,) = find_indices([data_name], class_names)
        if index is None:
            raise Refused(
                f"--init_classes {data_name}={weights_name}: the data have no class {data_name}, "
                f"but {format_names(class_names)}"
            )
        class_map[class_names[index]] = weights_name
    return class_map
