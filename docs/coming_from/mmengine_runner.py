import torch
import torch.nn.functional as F
from mine import Digits, Net
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torchvision import transforms

EPOCHS, BATCH, RATE = 6, 64, 0.05  # the batch is that of one GPU


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, images, labels, mode="tensor"):
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels)} if mode == "loss" else (logits, labels)


class Accuracy(BaseMetric):
    def process(self, batch, outputs):
        logits, labels = outputs
        self.results.append(((logits.argmax(1) == labels).sum().item(), len(labels)))

    def compute_metrics(self, results):
        right, count = map(sum, zip(*results, strict=True))
        print(f"accuracy {right / count:.4f}")
        return {"accuracy": right / count}


def loader(part, shuffle):
    prepare = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    sampler, collate = {"type": "DefaultSampler", "shuffle": shuffle}, {"type": "default_collate"}
    return {"dataset": Digits(part, prepare), "batch_size": BATCH, "sampler": sampler, "collate_fn": collate}


torch.manual_seed(0)
runner = Runner(
    model=Classifier(),
    work_dir="work_dir",
    train_dataloader=loader("train", True),
    optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": RATE, "momentum": 0.9}},
    train_cfg={"by_epoch": True, "max_epochs": EPOCHS, "val_interval": 1},
    val_dataloader=loader("val", False),
    val_cfg={},
    val_evaluator={"type": Accuracy},
    default_hooks={"logger": {"type": "LoggerHook", "interval": 1}},
    log_processor={"type": "LogProcessor", "window_size": 1},  # else the logged loss is a mean of ten
)
runner.train()
