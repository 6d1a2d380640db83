import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from mine import Digits, Net
from torch.utils.data import DataLoader
from torchvision import transforms

EPOCHS, BATCH, RATE = 6, 64, 0.05  # the batch is that of one GPU


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        found = self.trainer.callback_metrics
        if "train_loss" in found:
            print(f"loss {found['train_loss']:.6f}, accuracy {found['accuracy']:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)


prepare = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)
train = DataLoader(Digits("train", prepare), BATCH, shuffle=True)
val = DataLoader(Digits("val", prepare), BATCH)
torch.manual_seed(0)
trainer = pl.Trainer(
    max_epochs=EPOCHS, accelerator="auto", devices="auto", log_every_n_steps=1, enable_progress_bar=False
)
trainer.fit(Classifier(), train, val)
