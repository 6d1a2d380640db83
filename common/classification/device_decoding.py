"""Micro-batches whose JPEGs the device decodes: see `common.data.device_decoding`."""

import torch

from common.classification.transforms import TrainingTransform
from common.data.decoding import Picture
from common.data.device_decoding import Encoded, Jpeg, decoder, for_device, refuse_cache
from common.errors import Refused


def check(transform: TrainingTransform, cached: bool) -> None:
    """Raise `Refused` for options that need pixels in the worker."""
    if transform.policy:
        raise Refused(
            "--decode device: a policy works on images in the data worker; leave out --augment, or take --decode worker"
        )
    refuse_cache(cached)


def varied(transform: TrainingTransform, picture: Picture) -> torch.Tensor | Jpeg:
    """The transformed pixels uint8[3, H, W], or what the device needs to make them."""
    view = transform.draw(picture.height, picture.width)
    return for_device(picture, view) or transform.show(picture, view)


def stack(
    images: list[torch.Tensor | Jpeg], names: list[str], transform: TrainingTransform
) -> tuple[torch.Tensor, Encoded | None]:
    """Pixels uint8[n, 3, H, W] (channels_last) of the images that the worker has decoded, and the others, or None."""
    pixels = [image.permute(1, 2, 0) for image in images if isinstance(image, torch.Tensor)]
    stacked = torch.stack(pixels) if pixels else torch.empty(0, *transform.size, 3, dtype=torch.uint8)
    jpegs = {place: image for place, image in enumerate(images) if isinstance(image, Jpeg)}
    encoded = None
    if jpegs:
        names = [names[place] for place in jpegs]
        encoded = Encoded([*jpegs.values()], names, [*jpegs], transform.interpolation)
    return stacked.permute(0, 3, 1, 2), encoded


def decoded(pixels: torch.Tensor, encoded: Encoded) -> tuple[torch.Tensor, tuple[str, ...]]:
    """uint8[B, 3, H, W] of a whole micro-batch, and name and reason of each broken image, which a black one replaces.

    `pixels`, on the device, are those of the images that the worker decoded.
    """
    images, broken = decoder(pixels.device)(encoded)
    rows = dict(zip(encoded.places, torch.stack(images).to(torch.uint8).split(1), strict=True))
    others = iter(pixels.split(1))  # slices, because indices would have to be copied to the device
    whole = [rows[place] if place in rows else next(others) for place in range(len(pixels) + len(rows))]
    return torch.cat(whole), tuple(broken.values())
