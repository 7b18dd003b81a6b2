"""Random networks train within random budgets: counted peaks stay within them, and gradients have the same bits.

One seed alone: ``MUCUDNN_FUZZ_SEED=123 pytest tests/optimizing/test_keeping_random.py``; 500 from the thousandth:
``MUCUDNN_FUZZ_FIRST=1000 MUCUDNN_FUZZ_COUNT=500``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import cast
from unittest import mock

import pytest
import torch
from support.effort import seeds
from support.processes import forking
from support.random_blocks import KINDS, random_channels, random_kinds, wide
from support.random_training import Draw, model_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.problem import Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.team import ALONE
from mucudnn.kernels.algorithm import why_unsupported
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.turns import Rounds
from mucudnn.optimizing import keeping
from mucudnn.optimizing.keeping import keep_within
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.choices import Choices
from mucudnn.running.keeping import KeepingModule
from mucudnn.running.modules import make_tunable, why_left_alone
from mucudnn.running.norms import make_groups
from mucudnn.running.pending import ChangedError
from mucudnn.tuning.model_state import OwnStep, undisturbed
from mucudnn.tuning.trace import trace

pytestmark = pytest.mark.fuzz

CHUNK = 20
CHUNKS = [range(start, min(start + CHUNK, seeds(4, 200).stop)) for start in seeds(4, 200)[::CHUNK]]
BLOCKS: dict[str, int] = {**KINDS, "grouped": 6, "skipped": 8, "dense": 6, "observed": 0}  # which keeps tensors itself
OURS = ["implicit-gemm", "winograd-4x4", "pointwise", "depthwise", "gemm", "direct"]


@dataclass(frozen=True)
class Within:
    """A random network, and where its budget is between the least and PyTorch's peak.

    has_groups: whether norms run as groups.
    algorithms: to choose from for convolutions; empty for PyTorch's own.
    share: 0 for the least budget, 1 for what PyTorch needs.
    """

    network: Draw
    batch_size: int
    has_groups: bool
    algorithms: tuple[str, ...]
    share: float

    def model(self) -> nn.Module:
        model = model_of(self.network, 1)
        with undisturbed(model), self.autocast():
            if self.algorithms:
                choose(model, self.x(), self.algorithms)
            if self.has_groups:
                with suppress(ChangedError):
                    make_groups(model, lambda one: one(self.x()))
        return model

    def x(self) -> Tensor:
        x = torch.randn(self.batch_size, 3, *self.network.extent, generator=torch.Generator().manual_seed(2))
        if self.network.x_format == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        return x.requires_grad_(self.network.needs_dx)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.network.autocast)


def drawn(seed: int) -> Within:
    random = Random(f"budget {seed}")
    dims = random.choice([1, 2, 2, 2, 2, 2, 2, 2, 2, 3])
    is_last = dims > 1 and random.random() < 0.4
    kinds = sum((random_kinds(random, BLOCKS) for _ in range(random.choice([1, 2, 3]))), ())
    network = Draw(
        kinds,
        random.choice([8, 16, 24, 32, random_channels(random)]),
        tuple(random.randint(*((400, 900), (16, 40), (6, 12))[dims - 1]) for _ in range(dims)),
        random.choice(["features", "scores", "scores", "pair"]),
        (None,) * len(kinds),
        autocast=dims < 3 and random.random() < 0.15,
        x_format="channels_last" if is_last else "contiguous",
        model_format="channels_last" if is_last and random.random() < 0.5 else "contiguous",
        needs_dx=random.random() < 0.3,
    )
    return Within(
        network,
        random.randint(1, 4),
        has_groups=random.random() < 0.5,
        algorithms=tuple(random.sample(OURS, 3)) if random.random() < 0.3 else (),
        share=random.choice([0.0, 1.0, *[random.random()] * 4]),
    )


def choose(model: nn.Module, x: Tensor, names: Sequence[str]) -> None:
    """Have convolutions run the first of these algorithms that can compute them, in micro-batches of one sample."""
    modules = dict(model.named_modules())
    for call in trace(model, x):
        module = modules[call.name]
        if why_left_alone(module) is not None:
            continue
        configurations = {}
        for problem in map(call.problem_of, Operation):
            able = [name for name in names if why_unsupported(algorithm(name), problem) is None]
            for name in able[:1]:
                parts = (MicroConfig(name, 1),) * call.batch_size
                configurations[problem] = {call.batch_size: Configuration(parts, 1.0, 2**40)}
        make_tunable(module)
        vars(module)["choices"] = Choices.of(configurations)


def keep(model: nn.Module, within: Within, budget_bytes: int) -> None:
    with mock.patch.object(keeping, "_ROUNDS", Rounds(1, 1, 0.0)), within.autocast():
        keep_within(model, within.x(), Config(memory_budget=budget_bytes), None, ALONE, lambda *_: None)


def least_bytes(within: Within) -> int:
    """Return the budget that the refusal of a smaller one names."""
    with pytest.raises(InfeasibleError, match="at least") as raised:
        keep(within.model(), within, 1)
    named = re.search(r"at least (\d+)B", str(raised.value))
    assert named is not None
    return int(named[1])


def step_bytes(model: nn.Module, within: Within) -> int:
    """Return the higher peak of two steps beside the gradients of the parameters."""
    step = OwnStep(within.x())

    def run(model: nn.Module) -> None:
        with within.autocast():
            step(model)

    run(model)  # in which libraries allocate what they keep
    return max(max(MeasuredStep(model, run, "cpu").peaks()) for _ in range(2))


def trained(model: nn.Module, within: Within) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers of two steps."""
    seen: dict[str, Tensor] = {}
    for number in range(2):
        torch.manual_seed(number)
        model.zero_grad()
        x = within.x()
        with within.autocast():
            outputs = [y for y in tree_leaves(model(x)) if y.requires_grad]
        loss = sum((wide(y) * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs)
        loss.backward()
        needing = {"x": x, **dict(model.named_parameters())}
        seen |= {f"output {number} {index}": y.detach() for index, y in enumerate(outputs)}
        seen |= {f"gradient {number} of {name}": one.grad for name, one in needing.items() if one.grad is not None}
        seen |= {f"buffer {number} {name}": one.clone() for name, one in model.named_buffers()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)
    return seen


def can_train(within: Within) -> bool:
    """Return whether PyTorch can: some networks change in place what gradients need."""
    try:
        trained(model_of(within.network, 1), within)
    except (RuntimeError, ValueError):
        return False
    return True


def wrong_with(within: Within) -> Iterator[str]:
    """Yield what is wrong with steps within the least budget, and within one between that and what PyTorch needs."""
    least, all_bytes = least_bytes(within), step_bytes(within.model(), within)
    if least > 1.01 * all_bytes:
        yield f"{least} are the least budget, and {all_bytes} are enough"
    expected = trained(within.model(), within)
    for budget_bytes in dict.fromkeys((least, int(least + within.share * max(0, all_bytes - least)))):
        model = within.model()
        try:
            keep(model, within, budget_bytes)
        except InfeasibleError as error:
            yield f"{error}, and {least} were named"
            continue
        counted_bytes = step_bytes(copy.deepcopy(model), within)
        if counted_bytes > budget_bytes:
            yield f"a step takes {counted_bytes}, and {budget_bytes} are the budget"
        seen = trained(model, within)
        different = [name for name in expected | seen if not equal(expected.get(name), seen.get(name))]
        kept = cast(KeepingModule, model).keeping
        # Sums have another order in segments, and maybe of gradients that are copies behind concatenations.
        if kept.segments or any(name == "aten::cat" for name, _ in kept.choices):
            different = [name for name in different if " 0 " in name and not is_near(expected, seen, name, within)]
        if different:
            yield f"within {budget_bytes}: {len(different)} of {len(expected)} differ: {different[:8]}"


def equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first.nan_to_num(), second.nan_to_num())


def is_near(expected: dict[str, Tensor], seen: dict[str, Tensor], name: str, within: Within) -> bool:
    """Return whether a result differs by little beside the largest of its kind: some gradients cancel."""
    if expected.keys() != seen.keys():
        return False
    kind = name.split()[0]
    largest = max(float(one.double().norm()) for other, one in expected.items() if other.split()[0] == kind)
    error = float((expected[name].double() - seen[name].double()).norm())
    return error <= (0.1 if within.network.autocast else 1e-2) * largest


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: f"{chunk.start}-{chunk.stop - 1}")
def test_steps_stay_within_random_budgets_with_the_same_bits(chunk: range) -> None:
    failures = []
    for seed in chunk:
        within = drawn(seed)
        if can_train(within) and (wrong := [*wrong_with(within)]):
            failures.append("\n".join((f"seed {seed}:", *wrong, str(within.network), str(within))))
    assert not failures, "\n\n".join(failures)


def test_another_process_names_the_same_least_budgets() -> None:
    draws = [within for within in map(drawn, seeds(2, 8)[:8]) if can_train(within)]
    with ProcessPoolExecutor(1, mp_context=forking(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        assert [*pool.map(least_bytes, draws)] == [*map(least_bytes, draws)]
