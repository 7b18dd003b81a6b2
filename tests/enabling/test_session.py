"""When what is met is tuned, what runs until then, what is told, and that tuning leaves no trace."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import inf
from typing import Any

import pytest
import torch
from support.made_up_workshop import MadeUpWorkshop, enabled
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.core import errors
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Task
from mucudnn.core.tables import WIDTH
from mucudnn.enabling.session import Session
from mucudnn.enabling.status import Origin, Status
from mucudnn.running.dispatcher import Kernel, Wrapper, wrapped


@pytest.fixture
def workshop() -> MadeUpWorkshop:
    return MadeUpWorkshop()


@pytest.fixture
def session(workshop: MadeUpWorkshop) -> Iterator[Session]:
    with enabled(workshop) as session, torch.no_grad():
        yield session


W = torch.randn(6, 4, 3, 3)


def convolve(n: int = 2, height: int = 8, width: int = 8) -> None:
    y = F.conv2d(torch.randn(n, 4, height, width), W)
    assert y.shape == (n, 6, height - 2, width - 2)


def sizes(workshop: MadeUpWorkshop) -> list[tuple[int, int, int]]:
    return [(task.batch_size, task.problem.h, task.problem.w) for task in workshop.tuned]


def test_the_first_size_of_a_layer_is_tuned_when_it_is_met(session: Session, workshop: MadeUpWorkshop) -> None:
    for _ in range(3):
        convolve()
    assert sizes(workshop) == [(2, 8, 8)]
    (met,) = session.status().problems
    assert (met.calls, met.ours, met.decision.origin) == (3, 3, Origin.MEASURED)
    assert met.gained_s == pytest.approx(3 * 0.02)


def test_the_database_is_asked_once_and_saves_the_tuning(session: Session, workshop: MadeUpWorkshop) -> None:
    workshop.stored = True
    for _ in range(3):
        convolve()
        convolve(3)
    assert not workshop.tuned
    assert len(workshop.looked_up) == 2
    assert {met.decision.origin for met in session.status().problems} == {Origin.DATABASE}


def test_a_further_size_is_tuned_when_it_has_come_often_enough(session: Session, workshop: MadeUpWorkshop) -> None:
    convolve(8)
    convolve(4)  # once, as a last batch
    assert sizes(workshop) == [(8, 8, 8)]
    last = session.status().problems[1]
    assert (last.decision.origin, last.ours) == (Origin.NEAREST, 1)
    assert last.decision.configuration is not None
    assert last.decision.configuration.batch_size == 4
    convolve(4)
    for _ in range(3):
        convolve(2)
    assert sizes(workshop) == [(8, 8, 8), (4, 8, 8)]
    convolve(2)
    assert sizes(workshop)[2:] == [(2, 8, 8)]


def test_a_layer_is_tuned_once_its_calls_have_taken_as_long_as_tuning_is_expected_to(workshop: MadeUpWorkshop) -> None:
    def slowly(following: Kernel, *arguments: Any) -> Any:
        workshop.clock.advance(0.25)
        return following(*arguments)

    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    with wrapped(Wrapper(slowly, slowly)), enabled(workshop, patience=1.0) as session:
        for _ in range(8):  # 0.25 s each, a second and more at the 8th
            assert not workshop.tuned
            F.conv2d(x, W)
        assert workshop.prepared
        assert [(met.calls, met.ours) for met in session.status().problems] == [(8, 1)]
        assert session.expected_s == 1.0
        for height in range(5, 10):  # once each, a second together
            assert len(workshop.tuned) == 1
            F.conv2d(torch.zeros(2, 4, height, 6), W, dilation=2)
        assert len(workshop.tuned) == 2
        for _ in range(16):  # half as long for each of the two gradients, which are computed by one call
            F.conv2d(x, W.clone().requires_grad_(), stride=2).sum().backward()
        assert Counter(workshop.operations) == {"forward": 3, "backward_data": 1, "backward_filter": 1}
    with enabled(again := MadeUpWorkshop(stored=True), patience=1.0) as session:
        F.conv2d(x, W)
        assert [met.decision.origin for met in session.status().problems] == [Origin.DATABASE]
        assert not again.tuned


def test_a_size_near_a_tuned_one_waits_ten_times_as_long(
    workshop: MadeUpWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count(0.0, 0.25)
    with enabled(workshop) as session, torch.no_grad():
        convolve()
        monkeypatch.setattr("mucudnn.enabling.session.PATIENCE", 1.0)
        monkeypatch.setattr(session, "_now", lambda device: next(seconds))
        for width, calls, tuned in ((12, 31, 1), (12, 33, 2), (80, 8, 3)):
            for _ in range(calls):
                convolve(width=width)
            assert len(workshop.tuned) == tuned, width


def test_what_is_stored_for_the_nearest_size_runs_at_the_first_call(workshop: MadeUpWorkshop) -> None:
    workshop.near = [Task(ConvProblem(Operation.FORWARD, 4, 8, 10, 6, 3, 3), 2)]
    with enabled(workshop, patience=inf) as session, torch.no_grad():
        convolve()
        convolve(width=10)
        met = [(one.decision.origin, one.calls, one.ours) for one in session.status().problems]
        assert met == [(Origin.NEAREST, 1, 1), (Origin.DATABASE, 1, 1)]
    assert not workshop.tuned


def test_what_comes_once_is_only_timed_until_its_layer_is_due(workshop: MadeUpWorkshop) -> None:
    def slowly(following: Kernel, *arguments: Any) -> Any:
        workshop.clock.advance(1 / 64)
        return following(*arguments)

    with wrapped(Wrapper(slowly, slowly)), enabled(workshop, patience=1.0) as session, torch.no_grad():
        for width in (10, 11, *[10] * 6):  # an eighth of a second together
            assert not session.status().problems
            convolve(width=width)
        assert not workshop.looked_up
        assert session.status().in_one_line() == "calls of 2 shapes took too little time to be worth tuning"
        convolve(width=10)
        assert [met.calls for met in session.status().problems] == [8]
        for width in range(12, 60):
            assert not workshop.tuned
            convolve(width=width)  # once each, a second together with those before
        convolve(width=72)
        assert sizes(workshop) == [(2, 8, 72)]
        convolve(width=73)
        assert session.status().problems[-1].decision.origin is Origin.NEAREST, "at its first call"


def test_shapes_that_come_once_are_forgotten_to_make_room(
    workshop: MadeUpWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mucudnn.enabling.session._MOST_KEPT", 8)
    monkeypatch.setattr("mucudnn.enabling.session._DESCRIBED", 0.0)
    with enabled(workshop, patience=1e9) as session, torch.no_grad():
        for width in range(9, 40):
            convolve(width=width)
            convolve(width=width)
            assert len(session.calls) <= len(session.sizes) + 1 <= 9
            assert not session.only_timed
        assert session.status().passed_by == (("more than 8 shapes came, and these were forgotten", 24),)
        monkeypatch.setattr("mucudnn.enabling.session.PATIENCE", 0.0)
        for width in range(40, 60):
            F.conv2d(torch.zeros(1, 4, 3, width), W, stride=width)
    assert len(workshop.tuned) == len(session.sizes) == 20, "what is tuned is kept"


def test_near_sizes_run_the_choice_of_the_tuned_one_and_others_torchs_own(
    session: Session, workshop: MadeUpWorkshop
) -> None:
    for n, size in ((2, 8), (7, 8), (2, 10), (2, 40)):  # tuned, larger batch, larger images, much larger images
        convolve(n, size, size)
    met = session.status().problems
    assert [(one.decision.origin, one.ours) for one in met] == [
        *((Origin.MEASURED, 1), (Origin.NEAREST, 1), (Origin.NEAREST, 1), (Origin.NONE, 0))
    ]
    assert met[1].decision.configuration is not None
    assert met[1].decision.configuration.batch_size == 7
    workshop.algorithm = "native"
    for n, size in ((4, 8), (3, 8), (4, 9)):
        F.conv2d(torch.randn(n, 4, size, size), W, stride=2)
    assert not any(one.ours for one in session.status().problems[4:])


def test_an_error_of_tuning_is_said_once_and_torchs_own_runs_until_it_is_given_up(
    session: Session, workshop: MadeUpWorkshop
) -> None:
    errors._said.clear()
    workshop.fails = RuntimeError("a made-up failure\nand a stack trace")
    with pytest.warns(RuntimeWarning, match="PyTorch's own convolution runs, its tuning failed: a made-up failure"):
        convolve()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convolve()
    workshop.fails = None
    convolve(3)  # is another size: it may succeed when it comes again
    convolve(3)
    assert [met.ours for met in session.status().problems] == [0, 1]
    assert session.status().problems[0].decision.origin is Origin.NONE
    workshop.fails = RuntimeError("a file is locked")
    workshop.tuned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stride in range(2, 8):
            F.conv2d(torch.zeros(1, 4, 9, 9), W, stride=stride)
    assert len(workshop.tuned) == 3
    assert "3 times in a row" in session.status().problems[-1].decision.why


def test_tuning_sees_torchs_own(session: Session, workshop: MadeUpWorkshop) -> None:
    def convolve_inside(task: Task) -> None:
        before = len(session.calls)
        F.conv2d(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3))
        assert len(session.calls) == before

    workshop.while_tuning = convolve_inside
    convolve()
    assert session.status().problems[0].ours == 1


class Counting(torch.overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_tuning_leaves_no_trace(workshop: MadeUpWorkshop) -> None:
    packed, seen = list[Tensor](), list[Operation]()
    counting, layer, x = Counting(), nn.Conv2d(4, 6, 3), torch.randn(2, 4, 8, 8)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def train_a_little(task: Task) -> None:
        """As measuring does."""
        before, counted = len(packed), counting.calls
        w = torch.ones(2, 2, requires_grad=True)
        with torch.enable_grad():
            assert (w @ w).dtype == torch.float32  # no autocast
            (w @ w).sum().backward()
        assert w.grad is not None
        assert not torch.is_inference_mode_enabled()
        assert (len(packed), counting.calls) == (before, counted)
        seen.append(task.problem.operation)

    workshop.while_tuning = train_a_little
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    random_before = torch.get_rng_state()
    with enabled(workshop), torch.autocast("cpu", torch.bfloat16), hooks, counting:
        layer(x).float().sum().backward()
        with torch.inference_mode():
            layer(x[:, :, :5])
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_before)
    assert seen[:2] == [Operation.FORWARD, Operation.BACKWARD_FILTER]
    assert packed


def test_other_threads_wait_while_one_measures(session: Session, workshop: MadeUpWorkshop) -> None:
    begun, computed, was_early = threading.Event(), threading.Event(), []

    def compute() -> None:
        begun.wait()
        with torch.no_grad():
            F.conv2d(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 3, 3))
        computed.set()

    other = threading.Thread(target=compute)

    def look(task: Task) -> None:
        if not begun.is_set():
            begun.set()
            was_early.append(computed.wait(0.05))

    workshop.while_tuning = look
    other.start()
    convolve()
    other.join()
    assert was_early == [False]
    assert computed.is_set()


def test_nothing_is_tuned_while_a_graph_is_captured(
    session: Session, workshop: MadeUpWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve()
    (met,) = session.status().problems
    met.device, met.ask_at = torch.device("cuda"), 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    session.decide(met)
    assert met.ask_at == 1
    assert len(workshop.tuned) == 1


# What ``status`` tells


def some_status() -> Status:
    """Two calls of a size that is tuned, one of another batch, one of larger images, and one that is never tuned."""
    with enabled(MadeUpWorkshop()) as session:
        x = torch.randn(4, 4, 8, 8, requires_grad=True)
        for _ in range(2):
            F.conv2d(x, W).sum().backward()
        F.conv2d(torch.randn(3, 4, 8, 8), W)
        F.conv2d(torch.randn(4, 4, 30, 30), W)
        F.conv_transpose2d(torch.zeros(1, 2, 4, 4), torch.zeros(2, 2, 3, 3), dilation=2, output_padding=1)
    return session.status()


def test_the_table_fits_and_names_what_was_met() -> None:
    text = str(some_status())
    lines = text.splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[0].split() == ["convolution", "calls", "forward", "backward", "data", "backward", "filter"]
    assert lines[1].split("  ")[0] == "4x8x8 -> 6, 3x3, batch 4"
    assert "gemm 1×4 2.00×" in lines[1]
    assert "~gemm 1×3 2.00×" in lines[2]
    assert "PyTorch, untuned" in lines[3]
    assert "4 problems: 2 measured, 1 nearest size, 1 not tuned; tuning took 2 s" in text
    assert "to be tuned once its calls have taken as long as tuning would" in text
    assert "never tuned, 1 shape of call: torch.float32 on cpu, or not a convolution of images or" in text


def test_sums_and_the_frame_have_every_problem() -> None:
    status = some_status()
    assert status.gained_s == pytest.approx(2 * 2 * 4 * 0.01 + 3 * 0.01)
    assert status.gained_share == pytest.approx(0.5)
    assert status.spent_s == pytest.approx(2.0)
    frame = status.to_frame()
    assert len(frame) == len(status.problems) == 4
    assert list(frame["batch_size"]) == [4, 4, 3, 4]
    assert list(frame["origin"]) == ["measured", "measured", "nearest size", "not tuned"]
    assert frame["gained_s"].sum() == pytest.approx(status.gained_s)


def test_nothing_met_says_what_to_do() -> None:
    assert "call mucudnn.enable()" in str(Status())
    assert len(Status().to_frame()) == 0
    assert Status().gained_share is None
