"""Training on several ranks in every way that torch offers, of a tuned model and under ``enable``: as torch trains.

On the CPU over gloo. With two GPUs ranks have one each, over NCCL. With one, what gloo can do for tensors of a GPU two
ranks do on it together, and the rest one rank over NCCL. Rows of docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.always_ours import choose_always_ours
from support.command_line import invoke
from support.problems.tuned_by_hand import ran
from support.ranks.group import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.results.variants import Communication
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.enabling import switch
from mucudnn.running.choices import Choices
from mucudnn.running.modules import TunedModule

SAMPLES, SIZE, CLASSES = 4, 10, 5  # of a rank's batch
STEPS, WARMUP_STEPS, PERIOD = 5, 2, 2

Steps = Iterator[Iterable[Tensor]]
Way = Callable[["Net"], Steps]
Forward = Callable[[nn.Module, Tensor, int], Tensor]  # of a model, images and the number of the step


class Net(nn.Module):
    """Three convolutions, one of which a step can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last, self.aside = nn.Conv2d(8, 4, 3), nn.Conv2d(3, 4, 3)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, all_of_it: bool = True) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).relu())
        return self.head(y + self.aside(x) if all_of_it else y)  # type: ignore[no-any-return]


def batch(step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank trains with in a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x.to(like), torch.randint(CLASSES, (SAMPLES,), generator=generator).to(like.device)


def loss(wrapped: nn.Module, step: int, forward: Forward | None = None) -> Tensor:
    x, labels = batch(step, next(iter(wrapped.parameters())))
    return cross_entropy(wrapped(x) if forward is None else forward(wrapped, x, step), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer | None = None, forward: Forward | None = None
) -> Steps:
    optimizer = optimizer or sgd(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(wrapped, step, forward).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield wrapped.parameters()


def ddp(**options: Any) -> Way:
    return lambda model: trained(DistributedDataParallel(model, **options))


def part_unused_on_one_rank(model: Net) -> Steps:
    """In every second step."""

    def forward(wrapped: nn.Module, x: Tensor, step: int) -> Tensor:
        y: Tensor = wrapped(x, all_of_it=dist.get_rank() == 0 or step % 2 == 0)
        return y

    yield from trained(DistributedDataParallel(model, find_unused_parameters=True), forward=forward)


def gradients_accumulated(model: Net) -> Steps:
    """Over two batches, of which only the second is communicated."""
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, 2 * step).backward()  # type: ignore[no-untyped-call]
        loss(wrapped, 2 * step + 1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield wrapped.parameters()


def with_a_hook(model: Net) -> Steps:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    yield from trained(wrapped)


def averaged_now_and_then(model: Net) -> Steps:
    """After some steps that communicate gradients each rank trains alone, and parameters are averaged each period."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # here: torch warns when it is imported

    wrapped = DistributedDataParallel(model)
    state = post_localSGD_hook.PostLocalSGDState(None, None, WARMUP_STEPS, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(wrapped), PeriodicModelAverager(PERIOD, WARMUP_STEPS))
    for step, parameters in enumerate(trained(wrapped, optimizer)):
        if step < WARMUP_STEPS or (step - WARMUP_STEPS) % PERIOD == 0:
            yield parameters


def zero(model: Net) -> Steps:
    """The optimizer's state is divided over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: torch warns when it is imported

    wrapped = DistributedDataParallel(model)
    yield from trained(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))


def parameters_sharded(model: Net) -> Steps:
    """By FSDP2: each convolution by itself, then the rest."""
    mesh = init_device_mesh(model.first.weight.device.type, (dist.get_world_size(),))
    for module in (model.first, model.last, model.aside, model):
        fully_shard(module, mesh=mesh)
    for parameters in trained(model):
        yield [parameter.full_tensor() for parameter in parameters]  # type: ignore[attr-defined]


def compiled_outside(model: Net) -> Steps:
    """The graph is divided where buckets end: with such small ones in front of every convolution."""
    torch._dynamo.reset()
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        yield from trained(cast(nn.Module, torch.compile(wrapped, backend="aot_eager")))


def compiled_inside(model: Net) -> Steps:
    torch._dynamo.reset()
    yield from trained(
        DistributedDataParallel(cast(nn.Module, torch.compile(model, backend="aot_eager", fullgraph=True)))
    )


def recomputed(use_reentrant: bool) -> Way:
    """Activations are not kept but computed again."""

    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=use_reentrant)
            return y

    return lambda model: trained(DistributedDataParallel(Checkpointed(model)))


def joined_unevenly(model: Net) -> Steps:
    """The last rank has fewer batches in the first epoch, and none in the second."""
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for batches in ((3, 2), (2, 0)):
        with Join([wrapped]):
            for step in range(batches[is_last]):
                optimizer.zero_grad()
                loss(wrapped, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        yield wrapped.parameters()


def normalized_together(model: Net) -> Steps:
    """By statistics of the batches of all ranks."""
    yield from trained(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model)))


WAYS: Mapping[str, Way] = {
    "ddp": ddp(),
    "static_graph": ddp(static_graph=True),
    "gradient_as_bucket_view": ddp(gradient_as_bucket_view=True),
    "find_unused_parameters": part_unused_on_one_rank,
    "no_sync": gradients_accumulated,
    "fp16": with_a_hook,
    "post-local-sgd": averaged_now_and_then,
    "zero": zero,
    "fully_shard": parameters_sharded,
    "compiled_ddp": compiled_outside,
    "ddp_of_compiled": compiled_inside,
    "checkpoint": recomputed(use_reentrant=False),
    "reentrant_checkpoint": recomputed(use_reentrant=True),
    "join": joined_unevenly,
}
EAGER: Mapping[str, Way] = dict.fromkeys(("compiled_ddp", "ddp_of_compiled"), WAYS["ddp"])  # compiling takes seconds
ONLY_ON_A_GPU: Mapping[str, Way] = {"sync_batch_norm": normalized_together}


Found = Mapping[str, Any]


class Trainer:
    """Trains in the ways of torch. measured: how many problems this rank has measured so far."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = Config(database=folder / "all.sqlite", algorithms="gemm", confirm=False)
        self.device, self.measured = device, 0

    def net(self, dtype: torch.dtype = torch.float64) -> Net:
        torch.manual_seed(0)
        return Net().to(self.device, dtype)

    def tuned(self, dtype: torch.dtype = torch.float64) -> Net:
        """All of its convolutions run something of ours, and none has run so far."""
        ours = self.net(dtype)
        x, _ = batch(0, ours.first.weight)
        mucudnn.optimize(ours, x, self.config, progress=self._count)
        torchs = [str(one) for _, one in mucudnn.report(ours).layers if one.configuration.is_baseline]
        assert not torchs, "\n".join(torchs)
        for module in ours.modules():
            if isinstance(module, TunedModule) and isinstance(module.choices, Choices):
                module.choices.executables.clear()
        return ours

    def compare(self, way: Way, torchs_way: Way) -> Found:
        expected, _ = final(torchs_way(self.net()))
        return {"optimize": self._optimized(way, expected), "enable": self._enabled(way, expected)}

    def shared(self) -> Found:
        """What is chosen for a database that is empty, and how much of it this rank measures."""
        chosen = mucudnn.report(self.tuned()).layers
        return {"choices": [f"{name}: {one.problem} {one.configuration}" for name, one in chosen]} | {
            "measured": self.measured
        }

    def autocast(self) -> Found:
        """How far torch's and ours are from float64, both in bfloat16 where autocast says so."""

        def forward(wrapped: nn.Module, x: Tensor, step: int) -> Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                y: Tensor = wrapped(x)
            return y.to(x.dtype)

        exact, _ = final(trained(DistributedDataParallel(self.net())))
        theirs, _ = final(trained(DistributedDataParallel(self.net(torch.float32)), forward=forward))
        with torch.autocast(self.device, torch.bfloat16):
            ours = self.tuned(torch.float32)
        mine, equal = final(trained(DistributedDataParallel(ours), forward=forward))
        errors = {"ours": difference(mine, exact), "torchs": difference(theirs, exact)}
        return errors | {"ran": sorted(ran(ours)), "equal": equal}

    def _optimized(self, way: Way, expected: Sequence[Tensor]) -> Found:
        ours = self.tuned()
        parameters, equal = final(way(ours))
        return {"difference": difference(parameters, expected), "equal": equal, "ran": sorted(ran(ours))}

    def _enabled(self, way: Way, expected: Sequence[Tensor]) -> Found:
        """A new session, so that what is counted is this way's."""
        switch._sessions.clear()
        with mucudnn.tuned(self.config), patch("mucudnn.enabling.session.PATIENCE", 0.0):  # tuned at the first call
            parameters, equal = final(way(self.net()))
        computed = {one.problem.operation for one in mucudnn.status().problems if one.ours}
        return {"difference": difference(parameters, expected), "equal": equal, "ran": sorted(computed)}

    def _count(self, text: str, fraction: float) -> None:
        self.measured += "measuring" in text


def final(steps: Iterable[Iterable[Tensor]]) -> tuple[list[Tensor], bool]:
    """The parameters at the end, and whether those of all ranks had the same bits whenever they were shown."""
    last, equal = [], True
    for parameters in steps:
        last = [parameter.detach().clone() for parameter in parameters]
        flat = torch.cat([parameter.flatten() for parameter in last])
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat)
        equal &= all(torch.equal(flat, other) for other in every)
    return last, equal


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))


def train(rank: int, folder: Path, device: str, names: Sequence[str]) -> Mapping[str, Found]:
    """What a rank finds that trains in the ways of these names, and what all of them choose together."""
    trainer, ways = Trainer(folder, device), {**WAYS, **ONLY_ON_A_GPU}
    with pytest.MonkeyPatch.context() as patch:
        choose_always_ours(patch)
        found = {"shared": trainer.shared()}
        for name in names:
            if name in ways:
                found[name] = trainer.compare(ways[name], EAGER.get(name, ways[name]))
            else:
                found[name] = getattr(trainer, name)()
            dist.barrier()
    return found


# A warning of a driver or a library is no failure of a convolution.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

TRAINED = ("bench", "data-parallel", "support.models_by_name:trained", "--input", "3x9x9")
QUICK = ("--batch", "2", "--rounds", "2", "--time-limit", "200ms")
RANKS = {  # by what they have: device, how many, and the ways in which they train
    "CPU": ("cpu", 2, [*WAYS]),
    "one GPU": ("cuda", 2, ["ddp", "sync_batch_norm"]),  # all-reduces, broadcasts and all-gathers only
    "GPUs": ("cuda", min(2, torch.cuda.device_count()), [*WAYS, *ONLY_ON_A_GPU]),
}


@pytest.fixture(
    scope="module", params=[name if name == "CPU" else pytest.param(name, marks=pytest.mark.gpu) for name in RANKS]
)
def of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Found]:
    """By rank: what a rank finds, by way."""
    device, size, ways = RANKS[request.param]
    also = [] if request.param == "one GPU" else ["autocast"]
    with closing(Ranks(size, device)) as ranks:
        return ranks.run(train, tmp_path_factory.mktemp("trained"), device, [*ways, *also])


def test_ranks_tune_together(of_ranks: Sequence[Found]) -> None:
    """Each measures problems of its own, and all choose alike."""
    choices, *others = (one["shared"]["choices"] for one in of_ranks)
    assert others == [choices] * len(others)
    measured = [one["shared"]["measured"] for one in of_ranks]
    assert sum(measured) == len(choices)
    assert min(measured) > 0


def test_training_is_torchs(of_ranks: Sequence[Found]) -> None:
    for one in of_ranks:
        for way in one.keys() - {"shared", "autocast"}:
            for how in ("optimize", "enable"):
                found = one[way][how]
                assert found["ran"] == sorted(Operation), f"{way}, {how}: torch's own ran in place of ours"
                assert found["equal"], f"{way}, {how}: the ranks' parameters have parted"
                assert found["difference"] < 1e-12, f"{way}, {how}"


def test_under_autocast_it_is_as_near_to_float64_as_torch(of_ranks: Sequence[Found]) -> None:
    for found in (one["autocast"] for one in of_ranks if "autocast" in one):
        assert found["ran"] == sorted(Operation)
        assert found["equal"]
        assert 0 < found["ours"] < 1.5 * found["torchs"]


@pytest.mark.parametrize(
    ("device", "communication"),
    [
        ("cpu", Communication.ALLREDUCE),
        *(pytest.param("cuda", communication, marks=pytest.mark.gpu) for communication in Communication),
    ],
)
def test_ranks_are_equal_and_steps_are_split(device: str, communication: Communication, tmp_path: Path) -> None:
    ranks, out = min(2, torch.cuda.device_count()) if device == "cuda" else 1, tmp_path / "out"
    how = ("--device", device, "--ranks", ranks, "--communication", communication.value)
    result = invoke(*TRAINED, *QUICK, *how, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    for line in read_folder(out).lines:
        assert (line["ranks"], line["equal"]) == (ranks, line["compared"])
        assert min(line[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "rest_s")) > 0
