"""Plain PyTorch in one process: python plain.py FOLDER."""

import sys

import torch
import torch.nn.functional as F
from fashion import Net, count_correct, load
from torch.utils.data import DataLoader

EPOCHS, BATCH, RATE = 2, 128, 0.05

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = load(sys.argv[1], train=True), load(sys.argv[1], train=False)
loader = DataLoader(train, BATCH, shuffle=True)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
for epoch in range(EPOCHS):
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: accuracy {count_correct(model, test, device).item() / len(test):.4f}")
