"""The algorithms for CUDA, without a GPU: on fake CUDA tensors, which tell mixed devices, and on real CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels import algorithm as contract
from mucudnn.kernels.algorithm import Algorithm, why_unsupported
from mucudnn.kernels.memory import empty_activation
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.testing.checks import Call, split
from mucudnn.testing.contract import GEOMETRIES, ONE_OF_EACH_KIND, VOLUMES, geometry

NAMES = [a.name for a in algorithms("cuda")]
STRIDED = ("winograd-2x2-stride2", "winograd-4x4-stride2", "winograd-4x4-5x5-stride2")
COMPILED_ALONE = ("implicit-gemm", "pointwise", "depthwise", "loop-nest", *STRIDED)
IN_TORCH = [name for name in NAMES if not name.startswith("winograd")]  # that has functions in CUDA C++
HALVES = ("bfloat16", "float16")


@pytest.fixture
def counted_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries allocate on CUDA is counted by what they allocate here."""
    count = contract._count
    monkeypatch.setattr(contract, "_count", lambda a, problem, n, device_type: count(a, problem, n, "cpu"))
    monkeypatch.setattr(contract, "_counted", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_there_are_torchs_own_first_and_then_ours_for_every_device() -> None:
    assert NAMES[:2] == ["native", "native-other-format"]
    on_the_cpu = {a.name for a in algorithms()}
    of_volumes = {name for name in on_the_cpu if name.startswith(("frames-", "rows-")) and name != "frames-native"}
    assert set(NAMES[2:]) == on_the_cpu - {"native", "native-other-format", *COMPILED_ALONE} - of_volumes
    for name in NAMES:
        a = algorithm(name, "cuda")
        assert isinstance(a, Algorithm)
        assert a == algorithm(name, "cuda")
        assert hash(a) == hash(algorithm(name, "cuda"))


# On fake tensors


class AsOperators(TorchFunctionMode):
    """Calls the operators themselves where torch's Python, on its way to them, asks for CUDA's runtime."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if function is Tensor.copy_:
            return torch.ops.aten.copy_(*args, **named)
        if function is Tensor.__getitem__:
            return sliced(*args)
        if function is torch.ops.aten.cudnn_convolution.out:  # a CUDA build picks it, which has no fake kernel
            x, w, padding, stride, dilation, groups, *_ = args
            y = torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, (0, 0), groups)
            return torch.ops.aten.copy_(named["out"], y)
        if "out" in named:
            return getattr(torch.ops.aten, function.__name__).out(*args, **named)
        return function(*args, **named)


def sliced(tensor: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    if index[0] is Ellipsis:
        index = (slice(None),) * (tensor.dim() + 1 - len(index)) + index[1:]
    dimension = 0
    for at in index:
        if isinstance(at, slice):
            tensor = torch.ops.aten.slice(tensor, dimension, at.start, at.stop, at.step or 1)
            dimension += 1
        else:
            tensor = torch.ops.aten.select(tensor, dimension, at)
    return tensor


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """Tensors on a CUDA device without storage: operators find their devices, shapes and types to agree, or raise."""
    with FakeTensorMode(), AsOperators():
        yield


def run_on_fakes(a: Algorithm, problem: ConvProblem, n: int) -> None:
    workspace = a.workspace(problem, n)
    prepared, scratch = (
        torch.empty(size, dtype=torch.uint8, device="cuda")
        for size in (workspace.prepared_bytes, workspace.scratch_bytes)
    )
    x, w, y = (
        empty_activation(problem, shape, "cuda")
        for shape in (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))
    )
    bias = w.new_zeros(problem.k) if problem.operation is Operation.FORWARD else None
    a.open(problem, w, prepared)
    a.step(problem, x, w, y, bias, prepared, scratch)
    a.close(problem, w, prepared)
    assert {tensor.device.type for tensor in (x, w, y)} == {"cuda"}


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("name", IN_TORCH)
def test_everything_that_is_run_is_on_the_device(name: str, operation: Operation, memory_format: MemoryFormat) -> None:
    a = algorithm(name, "cuda")
    keys = (*ONE_OF_EACH_KIND, "same-5x5", "tiles", "patches", "volume", "volume-groups", "patches-of-volume")
    for key, dtype in [*product(keys, ("float32",)), ("same-3x3", "bfloat16"), ("volume", "bfloat16")]:
        problem, batch_size, _ = geometry(key, operation, memory_format=memory_format, dtype=dtype)
        if why_unsupported(a, problem) is None:
            run_on_fakes(a, problem, batch_size)


# On the CPU


def cases(names: list[str], keys: tuple[str, ...], dtypes: tuple[str, ...] = ("float32",)) -> list[object]:
    parameters: list[object] = []
    for name, operation, key, memory_format, dtype in product(names, Operation, keys, MemoryFormat, dtypes):
        problem, batch_size, n = geometry(key, operation, memory_format=memory_format, dtype=dtype)
        if why_unsupported(algorithm(name, "cuda"), problem) is None:
            label = f"{name}-{operation}-{key}-{memory_format}-{dtype}"
            parameters.append(pytest.param(name, problem, batch_size, n, id=label))
    return parameters


@pytest.mark.usefixtures("counted_on_the_cpu")
@pytest.mark.parametrize(
    ("name", "problem", "batch_size", "n"),
    cases(["fft", "fft-tiled"], GEOMETRIES)
    + cases([name for name in IN_TORCH if not name.startswith("fft")], ONE_OF_EACH_KIND)
    + cases(IN_TORCH, ("same-3x3",), ("float64", *HALVES))
    + cases(["patches", "frames-native"], ("patches", *VOLUMES)),
)
def test_result_is_the_convolution_in_the_declared_bytes(
    name: str, problem: ConvProblem, batch_size: int, n: int
) -> None:
    a, call = algorithm(name, "cuda"), Call(problem, batch_size)
    expected = reference(problem, call.x, call.w, call.y)
    tolerance = DEFAULT_MAX_RELATIVE_ERROR[problem.dtype]
    assert relative_l2_error(call.run(a, split(a, problem, batch_size, n)), expected) <= tolerance
    assert call.undeclared_bytes <= 0
