"""Wrappers around torch's own convolutions: what they see, in which order, and that they leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.registered import no_wrapper_left
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.nn import functional as F

from mucudnn.running import dispatcher
from mucudnn.running.dispatcher import DEVICE_TYPES, Wrapper, pop, push, torchs_kernel, untouched, wrapped


@pytest.fixture(autouse=True)
def torchs_own_before_and_after() -> Iterator[None]:
    with no_wrapper_left():
        yield


class Recorder:
    """Notes the calls that come by: operator, and the shapes of the tensors."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.wrapper = Wrapper(self._noting("convolution"), self._noting("convolution_backward"))

    def _noting(self, operator: str) -> Callable[..., Any]:
        def wrap(following: Callable[..., Any], *arguments: Any) -> Any:
            self.calls.append((operator, tuple(arguments[0].shape)))
            return following(*arguments)

        return wrap

    @property
    def operators(self) -> list[str]:
        return [operator for operator, _ in self.calls]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    one = Recorder()
    with wrapped(one.wrapper):
        yield one


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_training_step_of_any_convolution_is_seen_and_is_torchs_own_bit_for_bit(
    dimensions: int, transposed: bool
) -> None:
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dimensions}d")
    module, x = kind(4, 6, 3, padding=1, groups=2), torch.randn(2, 4, *[5] * dimensions, requires_grad=True)

    def step() -> list[Tensor]:
        y: Tensor = module(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    expected, recorder = step(), Recorder()
    with wrapped(recorder.wrapper):
        given = step()
    assert recorder.operators == ["convolution", "convolution_backward"]
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def frames_compiled() -> int:
    """Functions that the compiler looks at when a convolution is left out of the graph."""
    x, w = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)

    @torch.compile(backend="aot_eager")
    def convolve(x: Tensor) -> Tensor:
        with open("/dev/null"):  # noqa: PTH123 (breaks the graph)
            return F.conv2d(x, w)

    expected = F.conv2d(x, w)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(convolve(x), expected)
    return int(torch._dynamo.utils.counters["frames"]["total"])


def test_the_compiler_does_not_look_behind_a_kernel() -> None:
    def deep(following: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return following(*arguments)

    def wrap(following: Callable[..., Any], *arguments: Any) -> Any:
        return deep(following, arguments)

    without = frames_compiled()
    with wrapped(Wrapper(wrap, wrap)):
        assert frames_compiled() == without


def test_the_last_pushed_is_called_first_and_each_can_be_popped_by_itself() -> None:
    order: list[str] = []

    def named(name: str) -> Wrapper:
        def wrap(following: Callable[..., Any], *arguments: Any) -> Any:
            order.append(name)
            return following(*arguments)

        return Wrapper(wrap, wrap)

    x, w, (first, second, third) = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3), map(named, "abc")
    for wrapper in (first, second, third):
        push(wrapper)
    F.conv2d(x, w)
    pop(second)
    F.conv2d(x, w)
    pop(second)  # is no longer there
    pop(third)
    pop(first)
    F.conv2d(x, w)
    assert order == ["c", "b", "a", "c", "a"]


def test_what_a_wrapper_computes_itself_is_let_through() -> None:
    calls: list[int] = []

    def doubled(following: Callable[..., Any], *arguments: Any) -> Any:
        calls.append(1)
        with untouched, untouched:
            F.conv2d(*arguments[:2])  # would come back here for ever
        return 2 * following(*arguments)

    x, w = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    expected = 2 * F.conv2d(x, w)
    with wrapped(Wrapper(doubled, doubled)):
        assert torch.equal(F.conv2d(x, w), expected)
    assert len(calls) == 1


def test_threads_may_push_and_pop_while_others_compute() -> None:
    x, w, done, wrong = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3), threading.Event(), []
    expected = F.conv2d(x, w)

    def compute() -> None:
        while not done.is_set():
            if not torch.equal(F.conv2d(x, w), expected):
                wrong.append(1)

    def change() -> None:
        for _ in range(50):
            with wrapped(Recorder().wrapper):
                F.conv2d(x, w)

    with wrapped(Recorder().wrapper):  # the first is installed before
        computing = threading.Thread(target=compute)
        changing = [threading.Thread(target=change) for _ in range(3)]
        for thread in (computing, *changing):
            thread.start()
        for thread in changing:
            thread.join()
        done.set()
        computing.join()
    assert not wrong


@pytest.fixture
def another_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's forward mode uses it
def test_kernels_stay_while_there_are_other_threads_and_are_torchs_own() -> None:
    x, w = torch.randn(3, 2, 5, 5, requires_grad=True), torch.randn(4, 2, 3, 3, requires_grad=True)
    module = nn.Conv2d(2, 3, 3)

    def everything() -> list[Tensor]:
        y = F.conv2d(x, w)
        gradients = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(gradients[1].square().sum(), (x, w))
        with torch.autocast("cpu", torch.bfloat16):
            narrow = F.conv2d(x, w)
        each = vmap(grad(lambda w, x: F.conv2d(x, w).square().sum()), in_dims=(None, 0))(w, x)
        exported = torch.export.export(module, (x,), dynamic_shapes={"input": {0: torch.export.Dim.DYNAMIC}}).module()
        compiled = torch.compile(module, backend="aot_eager")(x)
        with torch.inference_mode():
            inferred = F.conv_transpose2d(x, w.transpose(0, 1))
        return [y, *gradients, *second, narrow, each, exported(x[:2]), compiled, inferred]

    recorder = Recorder()
    with untouched:
        expected = everything()
    torch._dynamo.reset()
    with wrapped(recorder.wrapper):
        pass
    assert dispatcher._libraries
    assert all(torch.equal(a, b) for a, b in zip(everything(), expected, strict=True))
    with FakeTensorMode() as mode:
        assert F.conv2d(mode.from_tensor(x), mode.from_tensor(w)).shape == (3, 4, 3, 3)
    assert not recorder.calls


def test_errors_are_torchs_or_the_wrappers_and_meta_tensors_pass_by(recorder: Recorder) -> None:
    x, w = torch.randn(1, 2, 4, 4), torch.randn(3, 5, 3, 3)
    with untouched, pytest.raises(RuntimeError) as expected:
        F.conv2d(x, w)
    with pytest.raises(RuntimeError) as given:
        F.conv2d(x, w)
    assert str(given.value) == str(expected.value)
    recorder.calls.clear()
    assert F.conv2d(x.to("meta"), w[:, :2].to("meta")).shape == (1, 3, 2, 2)
    assert not recorder.calls

    def fail(*_: Any) -> Any:
        raise ValueError("of a wrapper")

    with wrapped(Wrapper(fail, fail)), pytest.raises(ValueError, match="of a wrapper"):
        F.conv2d(x, w[:, :2])


def test_torchs_own_kernel_passes_wrappers_by(recorder: Recorder) -> None:
    for operator, device_type in product(("convolution", "convolution_backward"), DEVICE_TYPES):
        assert callable(torchs_kernel(operator, device_type))
    x, w = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    y = torchs_kernel("convolution", "cpu")(x, w, None, *geometry)
    gradients = torchs_kernel("convolution_backward", "cpu")(y, x, w, [0], *geometry, [True, True, False])
    assert not recorder.calls
    assert torch.equal(y, F.conv2d(x, w))
    assert gradients[0].shape == x.shape
    assert gradients[2] is None
