"""What search_optuna.py and search_ray.py search: trainings of a small network on scikit-learn's digits.

Trials tune their network into one database, so that each convolution is measured once, whatever searches. What was
measured while other programs were running is measured again by a later trial.
"""

import fcntl
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import mucudnn
from mucudnn.store.database import Database

WIDTHS, KERNEL_SIZES, BATCH_SIZES, LEARNING_RATES = (16, 32, 64), (3, 5), (32, 64), (0.01, 0.3)
EPOCHS = 4


def digits():
    """Return images and labels for training, and those for validation."""
    loaded = load_digits()
    images, labels = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(loaded.target)
    train, validation = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split([1280, 517])
    return (images[train], labels[train]), (images[validation], labels[validation])


def network(widths, kernel_size):
    """Return a network of two convolutions."""
    first, second = widths
    return nn.Sequential(
        *(nn.Conv2d(1, first, kernel_size, padding="same"), nn.ReLU()),
        *(nn.Conv2d(first, second, kernel_size, padding="same"), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * second, 10)),
    )


def measured(database):
    """Return the number of all results in a database."""
    with Database(database) as opened:
        return sum(sum(row[1:5]) for row in opened.info())


def tuned(model, images, database):
    """Return the model with tuned convolutions, the results that this added to the database, and the seconds it took.

    One process at a time tunes, since two that do would disturb each other's times, and measure the same.
    """
    with Path(f"{database}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, begun_s = measured(database), time.perf_counter()
        model = mucudnn.optimize(model, images, mucudnn.Config(database=database), progress=False)
        return model, measured(database) - before, time.perf_counter() - begun_s


def epochs(model, data, batch, learning_rate):
    """Train a model; yield its accuracy after each epoch, from 0 to 1."""
    (images, labels), (x, y) = data
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    for epoch in range(EPOCHS):
        model.train()
        for part in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            yield (model(x).argmax(1) == y).float().mean().item()
