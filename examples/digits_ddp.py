"""Train a network with torch's convolutions and with mucudnn's, from one seed, on one or more ranks, and compare.

    python digits_ddp.py                                           # one process
    torchrun --nproc-per-node 2 digits_ddp.py --out results        # two ranks; a plot and a JSON file
    torchrun --nproc-per-node 2 digits_ddp.py --data cifar-shaped  # ResNet-18 on synthetic images

It needs scikit-learn for the digits and matplotlib for the plot: pip install '.[examples]' in the clone.

The exit status is 1 where mucudnn and torch disagree: where the loss of the first step differs, where test accuracies
are too far apart or too low, or where the parameters of the ranks are not the same to the bit after every step.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mucudnn
from mucudnn.bench.sources.networks import build

FIRST_LOSS_WITHIN = 1e-4  # relative: float32, in another order of operations


def main():
    options = parsed_options()
    require_installed(["sklearn"] * (options.data == "digits") + ["matplotlib"] * (options.out is not None))
    device = join_the_ranks()
    wrong = compare(device, options)
    dist.barrier()  # torchrun ends all ranks when the first one fails
    dist.destroy_process_group()  # after the models that use it are freed: torch may hang on those that outlive it
    return 1 if wrong else 0


def compare(device, options):
    """Train with torch and with each policy. Returns in what they disagree."""
    if options.batch < 1 or options.batch % dist.get_world_size():
        sys.exit(f"--batch is {options.batch}: {dist.get_world_size()} ranks cannot share it evenly, give a multiple")
    load, network, epochs = DATA[options.data]
    images, labels = load()
    train, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).chunk(2)  # always the same
    deviation, mean = torch.std_mean(images[train])
    images = ((images - mean) / deviation).expand(-1, 3, -1, -1)  # gray images get three equal channels
    data = [TensorDataset(images[half], labels[half]) for half in (train, test)]
    options.epochs = options.epochs or epochs
    trainings = [Training(policy, data, network, device, options) for policy in (None, *options.policies)]
    for epoch in range(options.epochs):
        for training in trainings:  # in turns, so that a slow minute of the machine is everybody's
            training.train(epoch)
    wrong = disagreements(trainings, options)
    if dist.get_rank() == 0:
        report(trainings, wrong, options)
    return wrong


def require_installed(modules):
    """Before the training, which takes a minute."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        sys.exit(f"{' and '.join(missing)} cannot be imported: pip install '.[examples]' in the clone of mucudnn")


def parsed_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = [policy.value for policy in mucudnn.BatchSizePolicy]
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--policies", choices=policies, default=policies, nargs="+", help="of mucudnn.Config")
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together")
    parser.add_argument("--epochs", type=int, help="default: 10 of the digits, 4 of the other data")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="the highest one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-least", type=float, default=97.0, help="test accuracy to reach, in percent")
    parser.add_argument("--within", type=float, default=0.5, help="points between mucudnn's accuracy and torch's")
    parser.add_argument("--out", type=Path, help="folder for the plot and the JSON file")
    return parser.parse_args()


def join_the_ranks():
    """Meet the ranks that torchrun has started, or be the only one. Returns the device of this rank."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if backend == "gloo":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


# ---- Data, a network that learns it, and in how many epochs


def digits():
    """Return the 1797 digits of scikit-learn, 8x8 pixels."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1), torch.tensor(loaded.target)


def cifar_shaped():
    """Return synthetic images, 3x32x32: each class has a pattern, which is shifted, scaled in contrast, and noisy."""
    count, generator = 1536, torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 3, 8, 8, generator=generator), size=(32, 32), mode="bilinear")
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack([patterns[label].roll(by, (1, 2)) for label, by in zip(labels, shifts, strict=True)])
    contrasts = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return contrasts * images + torch.randn(images.shape, generator=generator) / 2, labels


def small_network():
    def block(in_channels, out_channels):
        convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(out_channels), nn.ReLU()

    blocks = (*block(3, 64), *block(64, 64), nn.MaxPool2d(2), *block(64, 128), *block(128, 128))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


# By name: images and labels, a network that learns them, and in how many epochs.
DATA = {
    "digits": (digits, small_network, 10),
    "cifar-shaped": (cifar_shaped, lambda: build("resnet18", num_classes=10), 4),
}


# ---- Training, as with torch alone but for one line


class Training:
    """A model in training, with what was seen of it.

    policy: mucudnn's; None: torch's convolutions. tuning_s: seconds of ``optimize``; next to none where the database
    knows these convolutions. losses: of each step, the mean over the ranks. accuracies, seconds: after each epoch, in
    percent, and of training alone since the beginning.
    """

    def __init__(self, policy, data, network, device, options):
        (train, self.test), self.device = data, device
        batch = options.batch // dist.get_world_size()
        torch.manual_seed(options.seed)
        model = network().to(device)
        start = time.perf_counter()
        if policy is not None:
            images, _ = train[:batch]
            model = mucudnn.optimize(model, images.to(device), mucudnn.Config(policy=policy))  # the line
        self.tuning_s = time.perf_counter() - start
        self.name = "torch" if policy is None else f"mucudnn, {policy}"
        self.report = mucudnn.report(model)
        self.model = DistributedDataParallel(model)
        self.sampler = DistributedSampler(train, seed=options.seed, drop_last=True)
        self.loader = DataLoader(train, batch, sampler=self.sampler, drop_last=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), options.learning_rate, momentum=0.9, nesterov=True)
        steps = options.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, options.learning_rate, total_steps=steps)
        self.losses, self.accuracies, self.seconds = [], [], []
        self.first_unequal_step = None

    def train(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        seconds, losses = 0.0, []
        for images, labels in self.loader:
            start = time.perf_counter()
            losses.append(self.step(images.to(self.device), labels.to(self.device)))
            seconds += time.perf_counter() - start
            if self.first_unequal_step is None and not ranks_are_equal(self.model):
                self.first_unequal_step = len(self.losses) + len(losses)
        self.losses += mean_over_ranks(losses, self.device)
        self.seconds.append(seconds + sum(self.seconds[-1:]))
        self.accuracies.append(self.accuracy())

    def step(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self):
        """Return the test accuracy in percent; each rank looks at its part of the images."""
        self.model.eval()
        images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in self.test.tensors)
        right = self.model(images.to(self.device)).argmax(1) == labels.to(self.device)
        return 100 * sum_over_ranks(right) / len(self.test)

    def seconds_to(self, accuracy):
        """Return the seconds of training after which the accuracy was reached first; None: it never was."""
        epochs = zip(self.seconds, self.accuracies, strict=True)
        return next((seconds for seconds, reached in epochs if reached >= accuracy), None)


def sum_over_ranks(values):
    total = values.sum()
    dist.all_reduce(total)
    return total.item()


def mean_over_ranks(values, device):
    total = torch.tensor(values, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def ranks_are_equal(model):
    """Return whether the parameters of all ranks are the same to the bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


# ---- Comparing


def disagreements(trainings, options):
    """Return what is wrong, in words; the same on all ranks."""
    torchs = trainings[0]
    wrong = []
    for one in trainings:
        apart = abs(one.accuracies[-1] - torchs.accuracies[-1])
        if one.first_unequal_step is not None:
            wrong.append(f"{one.name}: the ranks' parameters differ after step {one.first_unequal_step}")
        if abs(one.losses[0] - torchs.losses[0]) > FIRST_LOSS_WITHIN * torchs.losses[0]:
            wrong.append(f"{one.name}: the first loss is {one.losses[0]:.6f}, torch's is {torchs.losses[0]:.6f}")
        if one.accuracies[-1] < options.at_least:
            wrong.append(f"{one.name}: the accuracy is {one.accuracies[-1]:.2f} %, below {options.at_least:g} %")
        if apart > options.within:
            wrong.append(f"{one.name}: the accuracy is {apart:.2f} points from torch's, more than {options.within:g}")
    return wrong


def report(trainings, wrong, options):
    print(trainings[-1].report, end="\n\n")
    print(f"{options.data}, {options.epochs} epochs, {dist.get_world_size()} ranks, {options.batch} samples a step")
    print(f"{'':22}  accuracy  training {f'to {options.at_least:g} %':>9}    tuning  operations that mucudnn computes")
    for one in trainings:
        seconds_to = one.seconds_to(options.at_least)
        reached = "never" if seconds_to is None else f"{seconds_to:.2f} s"
        chosen = [tuned.configuration for _, tuned in one.report.layers]
        ours = f"{sum(not one.is_baseline for one in chosen)} of {len(chosen)}" if chosen else ""
        seen = f"{one.accuracies[-1]:8.2f} %{one.seconds[-1]:8.2f} s{reached:>10}{one.tuning_s:8.2f} s  {ours}"
        print(f"{one.name:22}{seen}")
    print(*(wrong or ["mucudnn and torch agree"]), sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / f"{options.data}.json", trainings, wrong, options)
        draw(options.out / f"{options.data}.png", trainings, options)


def write_json(path, trainings, wrong, options):
    runs = [
        {
            "name": one.name,
            "losses": one.losses,
            "accuracies": one.accuracies,
            "seconds": one.seconds,
            "tuning_s": one.tuning_s,
            "seconds_to_accuracy": one.seconds_to(options.at_least),
            "first_unequal_step": one.first_unequal_step,
            "chosen": [f"{name}: {tuned}" for name, tuned in one.report.layers],
        }
        for one in trainings
    ]
    given = {name: value for name, value in vars(options).items() if name != "out"}
    found = {"options": given, "ranks": dist.get_world_size(), "runs": runs, "disagreements": wrong}
    path.write_text(json.dumps(found, indent=1))


def draw(path, trainings, options):
    """Draw the losses over each other, and accuracies against seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2)
    for number, one in enumerate(trainings):
        style = {"color": "0.7", "linewidth": 4} if number == 0 else {"color": f"C{number - 1}", "linewidth": 1.2}
        by_step.plot(range(1, len(one.losses) + 1), one.losses, label=one.name, **style)
        by_time.plot(one.seconds, one.accuracies, label=one.name, **style)
    by_time.axhline(options.at_least, color="0.5", linestyle=":")
    by_step.set(title=f"{options.data}, {dist.get_world_size()} ranks", xlabel="step", ylabel="loss")
    by_time.set(xlabel="seconds of training", ylabel="test accuracy, %")
    by_step.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
