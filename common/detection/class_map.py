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
    for pair in filter(None, text.split(",")):
        own, _, theirs = (part.strip() for part in pair.partition("="))
        if not (own and theirs):
            raise Refused(
                f"--init_classes {text:.100}: must be OWN=THEIRS, joined by commas, such as "
                "mug=cup,sofa=couch"
            )
        (index,) = find_indices([own], class_names)
        if index is None:
            raise Refused(
                f"--init_classes {own}={theirs}: the data have no class {own}, but "
                f"{format_names(class_names)}"
            )
        class_map[class_names[index]] = theirs
    return class_map
