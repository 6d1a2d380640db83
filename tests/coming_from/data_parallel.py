"""A script of one process with torch's DataParallel, as it is before it becomes a recipe."""

import torch
import torch.nn.functional as F
from mine import Digits, Net
from torch.utils.data import DataLoader
from torchvision import transforms

EPOCHS, BATCH, RATE = 6, 64, 0.05

device = "cuda" if torch.cuda.is_available() else "cpu"
prepare = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)
train = DataLoader(Digits("train", prepare), BATCH, shuffle=True)
val = DataLoader(Digits("val", prepare), BATCH)

torch.manual_seed(0)
model = torch.nn.DataParallel(Net()).to(device)
optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
for epoch in range(EPOCHS):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in val)
    print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy {right / len(val.dataset):.4f}")
    torch.save(model.state_dict(), "model.pt")
