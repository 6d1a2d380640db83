"""Fashion-MNIST, a small network and its accuracy: what the scripts beside this file share."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms.v2.functional import pil_to_tensor


def load(root, train):
    """Pairs of an image [1, 28, 28], -1 to 1, and a label. root/MNIST/raw holds Fashion-MNIST, in
    the format of MNIST.
    """
    return MNIST(
        root, train=train, download=False, transform=lambda image: pil_to_tensor(image) / 127.5 - 1
    )


class Encoder(nn.Sequential):
    """Images [B, 1, 28, 28] -> features [B, 800]."""

    def __init__(self):
        first = nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
        super().__init__(*first, *second, nn.Flatten())


class Net(nn.Sequential):
    """Images [B, 1 or 3, 28, 28] -> logits [B, 10]. The three channels of a grey image are equal."""

    def __init__(self):
        super().__init__(Encoder(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        return super().forward(images[:, :1])


@torch.no_grad()
def count_correct(model, data, device):
    """How many of these images the model classifies correctly, a tensor of one number."""
    model.eval()
    batches = ((images.to(device), labels.to(device)) for images, labels in DataLoader(data, 500))
    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in batches)
    model.train()
    return correct
