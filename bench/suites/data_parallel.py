"""Data-parallel training steps on the ranks of a process group, with torch's and mucudnn's convolutions interleaved.

A step consists of forward pass, loss, backward pass and stochastic gradient descent with momentum. For each kind of
convolutions there is a copy of the model for each bucket size, in DistributedDataParallel, and one copy without
communication. Each round samples all copies, in the same order on all ranks, which start each sample together.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import mucudnn
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Header, Line, ResultFolder, bound_in_words, with_time
from mucudnn.bench.results.variants import TORCH, Communication, Variant
from mucudnn.bench.results.writing import Row, config_record
from mucudnn.bench.sources.models import blamed_in_training
from mucudnn.bench.sources.trainee import Batch, Loss, Trainee, labelled_batches, placed
from mucudnn.bench.suites.shared.step_costs import BACKWARD_S, FORWARD_S, REST_S, StepTimes, medians
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.records import Environment
from mucudnn.core.tables import Table, milliseconds, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.distributed.ranks import gathered
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.turns import in_turns

_TUNING = 0.5  # fraction of the displayed progress that tuning takes


@dataclass(frozen=True, slots=True)
class RanksSetting:
    """The settings of all training steps of a data-parallel run.

    batch_size: samples of each rank in a step.
    device: ``cpu`` or ``cuda``.
    period: steps between two averagings of the parameters, if ``communication`` averages them.
    bucket_caps: values of ``bucket_cap_mb``.
    """

    source: str
    ranks: int
    batch_size: int
    device: str
    dtype: str
    memory_format: MemoryFormat
    communication: Communication
    period: int
    bucket_caps: tuple[float | None, ...] = (None,)

    def subject(self, bucket_cap_mb: float | None) -> dict[str, Any]:
        """Return the columns that identify the result rows of one bucket size."""
        return {
            "network": self.source,
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "memory_format": str(self.memory_format),
            "communication": str(self.communication),
            "bucket_cap_mb": bucket_cap_mb,
        }

    def header(self, config: Config, rounds: int, environment: Environment) -> Header:
        """Return the header of the result folder, which describes the run.

        environment: that of every rank.
        """
        settings = {
            **{name: value for name, value in asdict(self).items() if name not in ("source", "device")},
            "averages_parameters": self.communication.averages_parameters,
            "rounds": rounds,
            **config_record(config),
        }
        return Header(
            "data-parallel",
            self.source,
            settings,
            environment,
            subject_columns=tuple(self.subject(None)),
            wanted=len(self.bucket_caps),
        )


def measure_data_parallel(
    setting: RanksSetting,
    model: nn.Module,
    input_shape: tuple[int, ...],
    loss: Loss,
    config: Config,
    *,
    rounds: int = 9,
    clock: Clock | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Return rows of step times for each bucket size, with torch's and with mucudnn's convolutions.

    Each rank of the default process group must call this function; all ranks return the same rows. The seconds of a row
    are those of the slowest rank in each round.

    model: on the CPU, in its dtype and memory format; left unchanged.
    input_shape: (C, H, W) of a sample.
    clock: times the steps, not the tuning; None for a wall clock.

    Raises ``InvalidInputError`` if the model cannot be trained, and the errors of ``mucudnn.optimize`` and torch.
    """
    (batch,) = labelled_batches(1, setting.batch_size, input_shape, stream=dist.get_rank())
    batch = placed(batch, setting.device, setting.memory_format, getattr(torch, setting.dtype))
    images, _ = batch
    clock = clock or wall_clock(setting.device)
    torchs = copy.deepcopy(model).to(setting.device).train()
    with blamed_in_training(setting.source, images.shape):  # errors of the model are reported before ours
        Trainee(copy.deepcopy(torchs), loss=loss).learn(*batch)
    ours = mucudnn.optimize(copy.deepcopy(torchs), images, config, progress=share_of(progress, 0.0, _TUNING))
    models = {Variant.TORCH: torchs, Variant.MUCUDNN: ours}
    alone = {
        variant: _Alone(Trainee(copy.deepcopy(model), loss=loss), batch, clock) for variant, model in models.items()
    }
    together = [
        _Together(variant, models[variant], cap, setting, batch, loss, clock)
        for cap in setting.bucket_caps
        for variant in models
    ]
    turns = in_turns([*(steps.sample for steps in alone.values()), *(steps.sample for steps in together)])
    progress = share_of(progress, _TUNING, 1 - _TUNING)
    for number in range(rounds):
        progress("steps in turns", number / rounds)
        next(turns)
    columns = {variant: steps.columns() for variant, steps in alone.items()}
    return [steps.row(setting, columns[steps.variant]) for steps in together]


class _Alone:
    """Timed steps without communication, which all ranks run at the same time: whole steps, and their parts."""

    def __init__(self, trainee: Trainee, batch: Batch, clock: Clock) -> None:
        self._step, self._clock = partial(trainee.step, *batch), clock
        self._times = StepTimes(self._step, clock, device=batch[0].device.type)
        self._samples_s, self._parts = list[float](), list[Mapping[str, float]]()
        self._step()

    def sample(self) -> None:
        dist.barrier()
        self._samples_s.append(self._clock.time(self._step, 1))
        dist.barrier()
        self._parts.append(self._times.parts(1))

    def columns(self) -> dict[str, float]:
        """Return medians by column name: of the whole step, and of its parts on the slowest rank."""
        slowest = [
            max(ranks, key=lambda parts: sum(parts.values())) for ranks in zip(*gathered(self._parts), strict=True)
        ]
        return {"alone_s": median(_slowest_s(self._samples_s)), **medians(slowest)}


class _Together:
    """Timed steps with communication between the ranks.

    Each sample has as many steps as needed until the parameters of all ranks are equal again, usually one.
    """

    def __init__(
        self,
        variant: Variant,
        model: nn.Module,
        bucket_cap_mb: float | None,
        setting: RanksSetting,
        batch: Batch,
        loss: Loss,
        clock: Clock,
    ) -> None:
        wire = Wire(setting.communication, setting.period)
        self.variant, self._cap, self._clock = variant, bucket_cap_mb, clock
        self._model = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=bucket_cap_mb)
        trainee = Trainee(self._model, loss=loss)
        trainee.optimizer = wire.connect(self._model, trainee.optimizer)
        self._step, self._steps = partial(trainee.step, *batch), wire.steps_to_equality
        self._bytes = wire.bytes_of_step(self._model)
        self._samples_s: list[float] = []
        for _ in range(wire.first_steps):
            self._step()
        self._compared = [compare_ranks(self._model)]

    def sample(self) -> None:
        dist.barrier()
        self._samples_s.append(self._clock.time(self._step, self._steps) / self._steps)
        self._compared.append(compare_ranks(self._model))

    def row(self, setting: RanksSetting, alone: dict[str, float]) -> Row:
        """Return the result row of a setting.

        alone: columns of steps without communication, which the row includes.

        The exposed time of communication, by which it lengthens a step, can be negative because of noise. Bucket sizes
        are those after the first step.
        """
        steps_s, data = _slowest_s(self._samples_s), self._model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return Row(
            setting.subject(self._cap),
            str(self.variant),
            steps_s,
            more={
                **alone,
                "exposed_s": median(steps_s) - alone["alone_s"],
                "bucket_bytes": [int(size) for size in str(data["rebuilt_bucket_sizes"]).split(",")],
                "collective_bytes": self._bytes,
                "compared": len(self._compared),
                "equal": sum(self._compared),
            },
        )


def _slowest_s(samples_s: Sequence[float]) -> list[float]:
    """Return the seconds of the slowest rank in each round."""
    return [max(ranks_s) for ranks_s in zip(*gathered(samples_s), strict=True)]


def compare_ranks(model: nn.Module) -> bool:
    """Return whether a model's parameters are equal on all ranks of the default process group.

    Every rank must call this function.
    """
    return len({*gathered(digest(model))}) == 1


def digest(model: nn.Module) -> str:
    """Return a hash of a model's parameters, which ranks use to compare them."""
    parameters = sha256()
    for parameter in model.parameters():
        parameters.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return parameters.hexdigest()


_LEFT: Columns[Line] = {
    "bucket_cap_mb": lambda step: "default" if step["bucket_cap_mb"] is None else f"{step['bucket_cap_mb']:g}",
    "convolutions": lambda step: step["contestant"],
}
_RIGHT: Columns[Line] = {
    "step ms": lambda step: milliseconds(step["time_s"]),
    "IQR / median": lambda step: f"{step['noise']:.1%}",
    "speedup": lambda step: ratio(step["torch_s"] / step["time_s"]),
    "samples/s": lambda step: f"{step['ranks'] * step['batch_size'] / step['time_s']:.1f}",
    "convolutions ms": lambda step: milliseconds(step[FORWARD_S] + step[BACKWARD_S]),
    "other compute ms": lambda step: milliseconds(step[REST_S]),
    "exposed ms": lambda step: milliseconds(step["exposed_s"]),
    "MiB a step": lambda step: f"{step['collective_bytes'] / 2**20:.4g}",
    "buckets": lambda step: str(len(step["bucket_bytes"])),
    "ranks equal": lambda step: f"{step['equal']} of {step['compared']}",
}


def data_parallel_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of step times with a row for each bucket size and contestant, and how ranks were compared.

    Speedups are over torch's convolutions with the same buckets.
    """
    settings, environment = folder.header.settings, folder.header.environment
    steps = [with_time(line) for line in folder.lines]
    torchs_s = {step["bucket_cap_mb"]: step["time_s"] for step in steps if step["contestant"] == TORCH}
    yield table_of(
        [{**step, "torch_s": torchs_s[step["bucket_cap_mb"]]} for step in steps],
        f"{folder.header.source}, {settings['ranks']} ranks of {settings['batch_size']} samples, "
        f"{settings['communication']}: data-parallel steps, {bound_in_words(settings)}",
        _LEFT,
        _RIGHT,
        caption="convolutions (timed in place), other compute: of steps without communication; exposed: what a step "
        "takes longer with it; MiB a step: what a rank gives to collectives",
    )
    after = (
        f"after the steps that average the parameters of all ranks, one in {settings['period']}"
        if settings["averages_parameters"]
        else "after each step that is measured, and after the first ones"
    )
    threads = "1 thread" if environment.threads == 1 else f"{environment.threads} threads"
    share = "" if environment.device_type == "cuda" else f", {threads} each"
    yield f"{settings['ranks']} ranks{share}; their parameters were compared bit by bit {after}."


_BEFORE_POWERSGD = 2  # Number of steps before PowerSGD, which allows no fewer; torch rebuilds the buckets in the first.


@dataclass(frozen=True, slots=True)
class Wire:
    """The communication between the ranks that train a model, by one of torch's methods.

    period: steps between two averagings of the parameters over all ranks, if ``communication`` averages them.
    """

    communication: Communication
    period: int

    @property
    def first_steps(self) -> int:
        """The number of warm-up steps, in which torch sets up its communication.

        After the last of these steps, all ranks have equal parameters.
        """
        return self.period + 1 if self.communication.averages_parameters else _BEFORE_POWERSGD + 1

    @property
    def steps_to_equality(self) -> int:
        """The number of steps after which ranks that started with equal parameters have equal parameters again."""
        return self.period if self.communication.averages_parameters else 1

    def connect(self, model: DistributedDataParallel, optimizer: Optimizer) -> Optimizer:
        """Set up this communication for the model, and return the optimizer to train the model with."""
        hook: tuple[Any, Any] | None = None  # its state, and the function
        match self.communication:
            case Communication.FP16:
                hook = None, fp16_compress_hook
            case Communication.BF16:
                hook = None, bf16_compress_hook
            case Communication.POWERSGD:
                hook = PowerSGDState(None, start_powerSGD_iter=_BEFORE_POWERSGD), powerSGD_hook
            case Communication.POST_LOCAL_SGD | Communication.HIERARCHICAL_SGD:
                # Imported here because torch.distributed.optim issues warnings about its own deprecated code.
                from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

                # Gradients are averaged over all ranks in the first steps only.
                state = PostLocalSGDState(None, None, self.period, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
                hook = state, post_localSGD_hook
                averager: ModelAverager
                if self.communication is Communication.POST_LOCAL_SGD:
                    averager = PeriodicModelAverager(self.period, warmup_steps=self.period)
                else:
                    by_period = levels(self.period, dist.get_world_size())
                    averager = HierarchicalModelAverager(by_period, warmup_steps=self.period)  # type: ignore[no-untyped-call]
                optimizer = PostLocalSGDOptimizer(optimizer, averager)
        if hook is not None:
            model.register_comm_hook(*hook)
        return optimizer

    def bytes_of_step(self, model: DistributedDataParallel) -> float:
        """Return the bytes that a rank passes to collectives in a step, on average over the averaging period."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        all_bytes = sum(p.numel() * p.itemsize for p in parameters)
        match self.communication:
            case Communication.FP16 | Communication.BF16:
                return sum(2 * p.numel() for p in parameters)
            case Communication.POWERSGD:
                return sum(_rank_one_elements(p) * p.itemsize for p in parameters)
            case Communication.POST_LOCAL_SGD:
                return all_bytes / self.period
            case Communication.HIERARCHICAL_SGD:
                return all_bytes * len(levels(self.period, dist.get_world_size())) / self.period
            case _:
                return all_bytes


def _rank_one_elements(gradient: Tensor) -> int:
    """Return the number of elements that PowerSGD sends for a gradient: two vectors if that saves at least half."""
    if gradient.ndim < 2:
        return gradient.numel()
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    return rows + columns if 2 * (rows + columns) < gradient.numel() else gradient.numel()


def levels(period: int, ranks: int) -> OrderedDict[int, int]:
    """Return how many ranks average their parameters together, by the number of steps between two averagings.

    All ranks average every ``period`` steps. Halfway between, the ranks of each host average among themselves; on a
    single host, the smallest groups into which the ranks can be divided do. If there are no such groups, or no step is
    halfway, only all ranks average.

    >>> dict(levels(4, 8)), dict(levels(4, 2))
    ({2: 2, 4: 8}, {4: 2})
    """
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    small = next((n for n in (on_host, *range(2, ranks)) if 1 < n < ranks and ranks % n == 0), None)
    within = {} if small is None or period % 2 else {period // 2: small}
    return OrderedDict({**within, period: ranks})
