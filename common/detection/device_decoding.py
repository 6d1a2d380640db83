"""Images with boxes whose JPEGs the device decodes: see `common.data.device_decoding`."""

from dataclasses import dataclass, replace

from common.data.device_decoding import Jpeg


@dataclass(frozen=True)
class Laid:
    """A JPEG that the device is to decode, at (left, top) on an empty image of `shape` (3, height, width)."""

    jpeg: Jpeg
    shape: tuple[int, int, int]
    left: int = 0
    top: int = 0

    def padded(self, left: int, top: int, width: int, height: int) -> "Laid":
        """This at (left, top) of an empty image."""
        return Laid(self.jpeg, (3, height, width), self.left + left, self.top + top)

    def flip(self, axis: int) -> "Laid":
        """The left-right mirror image (axis 2, the only one), as a tensor has it."""
        view = self.jpeg.view
        jpeg = replace(self.jpeg, view=replace(view, hflip=not view.hflip))
        return replace(self, jpeg=jpeg, left=self.shape[2] - self.left - view.size[1])
