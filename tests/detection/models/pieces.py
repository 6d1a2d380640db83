"""Helpers of the tests of several detectors."""

import torch

CANVAS = (128, 192)  # H, W: multiples of the coarsest stride, where torchvision's strides are exact


def build_scene(count):
    generator = torch.Generator().manual_seed(count)
    corners = torch.rand(count, 2, generator=generator) * torch.tensor([150.0, 90.0])
    sides = 8 + torch.rand(count, 2, generator=generator) * 100
    boxes = torch.cat([corners, torch.minimum(corners + sides, torch.tensor([191.7, 127.7]))], 1)
    labels = torch.randint(4, (count,), generator=generator)
    return {
        "boxes": boxes,
        "labels": labels,
        "crowd": torch.zeros(count, dtype=torch.bool),
        "position": count,
    }
