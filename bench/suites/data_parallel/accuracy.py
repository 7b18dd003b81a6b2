"""Time to accuracy: data-parallel training with torch's convolutions and with mucudnn's under each policy.

All trainings of a seed start with the same parameters, see the same images, and are interleaved epoch by epoch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas
import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mucudnn.bench.contests.variants import TORCH, shown_name
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import bound_in_words, new_table, ratio
from mucudnn.bench.sources.images import CLASSES, Images, load_images
from mucudnn.bench.sources.models import load_model
from mucudnn.bench.sources.networks import NETWORKS, build
from mucudnn.bench.suites.data_parallel.benchmark import digest
from mucudnn.distributed.link import gathered, joined
from mucudnn.optimizing.optimize import optimize
from mucudnn.running.environment import Environment
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.progress import Progress, silent
from mucudnn.words.units import format_seconds

OURS = "mucudnn"
_TESTED = 256  # number of test images in a batch


@dataclass(frozen=True, slots=True)
class Learning:
    """Settings of a training to a test accuracy. batch_size: samples of each rank. until: accuracy to reach, 0 to 1.

    learning_rate: the peak of the schedule, which is one cycle over all epochs.
    """

    source: str
    data: str
    ranks: int = 1
    batch_size: int = 32
    epochs: int = 4
    until: float = 0.8
    seeds: tuple[int, ...] = (0, 1, 2)
    policies: tuple[BatchSizePolicy, ...] = tuple(BatchSizePolicy)
    learning_rate: float = 0.02
    device: str = "cpu"

    def subject(self, seed: int) -> dict[str, Any]:
        """Return the columns that identify the rows of one seed."""
        own = {"network": self.source, "data": self.data, "ranks": self.ranks, "batch_size": self.batch_size}
        return {**own, "seed": seed}

    def header(self, config: Config, environment: Environment) -> Header:
        """Return the header of the result folder. environment: that of every rank."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("source", "device")}
        columns = tuple(self.subject(0))
        return Header(
            *("accuracy", self.source, {**config_record(config), **settings}, environment, columns, len(self.seeds))
        )


@dataclass(eq=False)
class _Training:
    """A model being trained on every rank. accuracies: test accuracy after each epoch; seconds: time of each epoch."""

    policy: BatchSizePolicy | None
    model: nn.Module
    data: Images
    learning: Learning
    seed: int
    tuning_s: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    are_equal: bool = True

    def __post_init__(self) -> None:
        learning = self.learning
        self._ddp = DistributedDataParallel(self.model)
        train = TensorDataset(*self.data.train)
        self._sampler: DistributedSampler[Any] = DistributedSampler(train, seed=self.seed, drop_last=True)
        self._loader = DataLoader(train, learning.batch_size, sampler=self._sampler, drop_last=True)
        steps = learning.epochs * len(self._loader)
        if not steps:
            raise InvalidInputError(
                f"{learning.data} has {len(train)} images, fewer than {learning.ranks} ranks of {learning.batch_size} "
                "samples take in a step; give a smaller --batch"
            )
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), learning.learning_rate, momentum=0.9, nesterov=True)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, learning.learning_rate, total_steps=steps)

    def train(self, epoch: int) -> None:
        """Train for an epoch, then test. The recorded seconds are those of the slowest rank."""
        self._ddp.train()  # type: ignore[no-untyped-call]
        self._sampler.set_epoch(epoch)
        seconds = 0.0
        for images, labels in self._loader:
            x, target = images.to(self.learning.device), labels.to(self.learning.device)
            start = time.perf_counter()
            self._step(x, target)
            seconds += time.perf_counter() - start
        self.seconds.append(max(gathered(seconds)))
        self.are_equal &= len({*gathered(digest(self._ddp))}) == 1
        self.accuracies.append(self._accuracy())

    def _step(self, x: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._ddp(x), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        loss.item()  # This waits for the GPU.

    @torch.no_grad()
    def _accuracy(self) -> float:
        """Return the fraction of test images that are classified correctly; each rank tests its own part of them."""
        self._ddp.eval()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        images, labels = (part[rank::ranks] for part in self.data.test)
        right = 0
        for start in range(0, len(labels), _TESTED):
            found = self._ddp.module(images[start : start + _TESTED].to(self.learning.device)).argmax(1).cpu()
            right += int((found == labels[start : start + _TESTED]).sum())
        return float(sum(gathered(right)) / len(self.data.test[1]))

    def row(self) -> Row:
        """Return the result row; ``seconds_to``: training time until the target accuracy, None if never reached."""
        known = zip(accumulate(self.seconds), self.accuracies, strict=True)
        more = {
            "accuracy": self.accuracies[-1],
            "accuracies": self.accuracies,
            "seconds_to": next((seconds for seconds, reached in known if reached >= self.learning.until), None),
            "tuning_s": self.tuning_s,
            "equal": self.are_equal,
        }
        contestant = TORCH if self.policy is None else OURS
        policy = None if self.policy is None else str(self.policy)
        return Row(self.learning.subject(self.seed), contestant, self.seconds, policy, more=more)


def measure_accuracy(learning: Learning, config: Config, progress: Progress = silent) -> list[Row]:
    """Train for every seed, with torch's and with mucudnn's convolutions; every rank must call this function.

    In mucudnn's rows, ``accuracy_over_spread`` is the difference of the mean accuracy over the seeds from torch's,
    divided by the range of torch's accuracies (at least one test image).

    Raises ``InvalidInputError`` if the model cannot learn the data, and the errors of ``optimize``.
    """
    data = load_images(learning.data)
    rows: list[Row] = []
    for number, seed in enumerate(learning.seeds):
        trainings = [_training(policy, data, learning, seed, config) for policy in (None, *learning.policies)]
        for epoch in range(learning.epochs):
            for training in trainings:
                progress(f"seed {seed}, epoch {epoch}", (number + epoch / learning.epochs) / len(learning.seeds))
                training.train(epoch)
        rows += [training.row() for training in trainings]
    progress("done", 1.0)
    return _with_spread(rows, 1 / len(data.test[1]))


def measure_alone(learning: Learning, config: Config, progress: Progress = silent) -> list[Row]:
    """Do the same as ``measure_accuracy`` in this process as the only rank of a group."""
    with joined(learning.device):
        rows = measure_accuracy(learning, config, progress)
        gc.collect()  # A model that outlives its process group may deadlock torch.
    return rows


def benchmark_accuracy(
    learning: Learning, header: Header, out: Path, measure: Callable[[], Sequence[Row]], *, again: bool = False
) -> None:
    """Write the rows of every seed into the folder ``out``. Nothing is measured if it has them, unless ``again``.

    measure: returns the rows of all seeds. Raises its errors and those of ``open_folder``.
    """
    with open_folder(out, header) as folder:
        if again or not folder.known(learning.subject(learning.seeds[-1])):
            rows = measure()
            for seed in learning.seeds:
                folder.add([row for row in rows if row.subject["seed"] == seed])
        folder.write_summary()


def _training(policy: BatchSizePolicy | None, data: Images, learning: Learning, seed: int, config: Config) -> _Training:
    torch.manual_seed(seed)
    source = learning.source
    model = build(source, num_classes=CLASSES) if source in NETWORKS else load_model(source, input_shape=data.shape)[0]
    model = model.to(learning.device).train()
    x, labels = (part[: learning.batch_size] for part in data.train)
    try:
        F.cross_entropy(model(x.to(learning.device)), labels.to(learning.device))
    except (RuntimeError, ValueError, IndexError) as error:
        shape = "x".join(map(str, x.shape[1:]))
        raise InvalidInputError(f"{source} cannot learn images of {shape} in {CLASSES} classes: {error}") from None
    start = time.perf_counter()
    if policy is not None:
        model = optimize(model, x.to(learning.device), replace(config, policy=policy))
    return _Training(policy, model, data, learning, seed, time.perf_counter() - start)


def _with_spread(rows: Sequence[Row], least: float) -> list[Row]:
    of_torch = [row.more["accuracy"] for row in rows if row.contestant == TORCH]
    spread = max(max(of_torch) - min(of_torch), least)
    own: dict[str | None, list[float]] = {}
    for row in rows:
        own.setdefault(row.policy, []).append(row.more["accuracy"])
    over = {policy: abs(mean(accuracies) - mean(of_torch)) / spread for policy, accuracies in own.items()}
    return [
        row if row.contestant == TORCH else replace(row, more={**row.more, "accuracy_over_spread": over[row.policy]})
        for row in rows
    ]


_COLUMNS = ("accuracy", "lowest to highest", "training", "speedup", "to accuracy", "speedup", "tuning", "ranks equal")


def accuracy_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table with a row for torch and for each policy, with means and medians over the seeds."""
    settings = folder.header.settings
    title = (
        f"{folder.header.source} on {settings['data']}, {settings['ranks']} ranks of {settings['batch_size']} samples, "
        f"{settings['epochs']} epochs, {len(settings['seeds'])} seeds, {bound_in_words(settings)}"
    )
    printed = new_table(title, ("convolutions", "policy"), _COLUMNS)
    groups: dict[Any, pandas.DataFrame] = dict(
        [*folder.rows.groupby(["contestant", "policy"], dropna=False, sort=False)]
    )
    torchs = _told(next(group for (name, _), group in groups.items() if name == TORCH))
    for (name, policy), group in groups.items():
        own = _told(group)
        printed.add_row(
            *(shown_name(str(name)), "" if name == TORCH else str(policy)),
            *(f"{own['accuracy']:.2%}", f"{group['accuracy'].min():.2%} to {group['accuracy'].max():.2%}"),
            *(format_seconds(own["training_s"]), ratio(torchs["training_s"] / own["training_s"])),
            "never" if own["to_s"] is None else format_seconds(own["to_s"]),
            "" if own["to_s"] is None or torchs["to_s"] is None else ratio(torchs["to_s"] / own["to_s"]),
            *("" if name == TORCH else format_seconds(own["tuning_s"]), "yes" if group["equal"].all() else "no"),
        )
    printed.caption = (
        f"accuracy: mean over the seeds after the last epoch; to accuracy: median time of training to "
        f"{settings['until']:.0%}; tuning: of the first seed"
    )
    yield printed


def _told(group: pandas.DataFrame) -> Mapping[str, Any]:
    reached = group["seconds_to"].dropna()
    return {
        "accuracy": group["accuracy"].mean(),
        "training_s": median(sum(samples) for samples in group["samples_s"]),
        "to_s": float(reached.median()) if len(reached) == len(group) else None,
        "tuning_s": float(group["tuning_s"].iloc[0]),
    }
