"""An ordinary PyTorch training loop, compiled: `python examples/pytorch_loop/train.py`.

A small CNN learns to tell bars from crosses in noise. The only Headrace in it is one line; take it
away and the same loop runs in eager PyTorch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import headrace as hr


class Cnn(nn.Module):
    """Two convolutions with batch norm, dropout, one linear layer; images [B, 1, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16 * 4 * 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3] of the classes bar, row, cross."""
        x = F.max_pool2d(F.relu(self.norm(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(self.dropout(x.flatten(1)))


def draw(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images [size, 1, 16, 16] of a bar (0), a row (1) or both (2), and their classes."""
    labels = torch.randint(0, 3, (size,), generator=generator)
    images = torch.randn(size, 1, 16, 16, generator=generator)
    places = torch.randint(2, 14, (size, 2), generator=generator)
    for i, label in enumerate(labels.tolist()):
        if label != 1:
            images[i, 0, :, places[i, 0]] += 2.0
        if label != 0:
            images[i, 0, places[i, 1], :] += 2.0
    return images, labels


def main(steps: int = 150) -> float:
    """Train, print the loss, and return the accuracy on images never seen."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step = hr.compile_step(train_step, model=model, optimizer=optimizer)  # the one line
    for i in range(steps):
        loss = step(*draw(64, generator))
        scheduler.step()  # a new learning rate is an input, so nothing compiles again
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:>3}  loss {loss.item():.4f}")

    images, labels = draw(512, generator)
    model.eval()
    with torch.no_grad():  # an eager forward sees the trained weights
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    print(f"accuracy on 512 new images {accuracy:.3f}, {step.programs} program")
    return accuracy


if __name__ == "__main__":
    main()
