"""A script of torchrun and DistributedDataParallel, as it is before it becomes a recipe."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mine import Digits, Net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

EPOCHS, BATCH, RATE, GPUS = 6, 32, 0.05, 2  # the batch is that of one GPU


def main(rank):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=GPUS)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    prepare = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    data = Digits("train", prepare)
    sampler = DistributedSampler(data)
    train = DataLoader(data, BATCH, sampler=sampler)
    val = DataLoader(Digits("val", prepare), BATCH)

    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device), device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                logits = ((model.module(images.to(device)).cpu(), labels) for images, labels in val)
                right = sum((scores.argmax(1) == labels).sum().item() for scores, labels in logits)
            print(
                f"epoch {epoch}: loss {loss.item():.6f}, accuracy {right / len(val.dataset):.4f}",
                flush=True,
            )
            torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=GPUS)
