"""Every build of the compiled algorithms that this processor runs computes what torch's operators compute.

A build is chosen once in a process: run as a program, this file saves what the build that ``MUCUDNN_BUILD`` names
computes to the file that is its argument.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.places import compile_builds

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.compiled import library
from mucudnn.kernels.compiled.library import BUILDS, bfloat16_products, loaded_build
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.testing.checks import Call

pytestmark = pytest.mark.slow

HALF = ("bfloat16", "float16")
DTYPES = ("float32", *HALF)
CHANNELS = (1, 16)  # a window of planes, and one of vectors
_MICRO_BATCHES = (2, 1)
# Channels that are no multiple of any vector, below and above the longest; maps that are no multiple of any tile.
_GEOMETRIES: dict[str, dict[str, int]] = {
    "few": {"c": 3, "k": 5, "h": 10, "w": 13},
    "many": {"c": 35, "k": 21, "h": 9, "w": 7},
    "even": {"c": 54, "k": 22, "h": 7, "w": 9},
    "grouped": {"c": 8, "k": 10, "h": 7, "w": 8, "groups": 2},
    "depthwise": {"c": 19, "k": 19, "h": 13, "w": 37, "groups": 19},
}


@dataclass
class Results:
    """By case: the error against float64. By algorithm that cannot: the reason.

    ``unlike``: by case, how many products of half precision are not what torch makes of them.
    """

    build: str
    errors: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unlike: dict[str, int] = field(default_factory=dict)


def compute() -> Results:
    torch.set_num_threads(1)  # the contract suite has more
    results = Results(loaded_build().name)
    if loaded_build().library is not None:
        results.unlike = {
            f"{dtype} {memory_format} {channels}": unlike_products(dtype, memory_format, channels)
            for dtype, memory_format, channels in product(HALF, MemoryFormat, CHANNELS)
        }
    for algorithm, case, problem in _cases():
        torch.manual_seed(1)
        call = Call(problem, sum(_MICRO_BATCHES))
        if reason := algorithm.supports(problem):
            results.reasons[algorithm.name] = reason
            continue
        expected = reference(problem, call.x, call.w, call.y)
        results.errors[case] = relative_l2_error(call.run(algorithm, _MICRO_BATCHES), expected)
    return results


def unlike_products(dtype: str, memory_format: MemoryFormat, channels: int) -> int:
    """Multiply all 2^16 values of a dtype with numbers that round in every way; count what torch rounds otherwise.

    A product of two such numbers is exact in float32 or rounded there once, so that only what is read and written
    differs. It is computed as a 1x1 convolution of one channel; further ones are zero.
    """
    of_dtype: torch.dtype = getattr(torch, dtype)
    numbers = torch.finfo(of_dtype)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(of_dtype)
    torch.manual_seed(0)
    chosen = [1.0, -1.0, 0.5, 0.75, 1 + numbers.eps, numbers.tiny, numbers.max, numbers.smallest_normal * numbers.eps]
    factors = torch.cat([torch.tensor(chosen), torch.randn(12), torch.inf * torch.ones(1)]).to(of_dtype)
    problem = ConvProblem(Operation.FORWARD, channels, 256, 256, len(factors), 1, 1, dtype=dtype)
    problem = replace(problem, memory_format=memory_format)
    call = Call(problem, 1)
    call.x.zero_()[0, -1] = every.view(256, 256)
    call.w.fill_(1)[:, -1] = factors.view(-1, 1, 1)
    computed = call.run(compiled.IMPLICIT_GEMM, [1])[0].flatten(1)
    flushes = dtype == "bfloat16" and channels > 1 and bfloat16_products() != "floats"
    smallest = numbers.tiny if flushes else 0.0  # of the numbers that the instruction for pairs does not flush
    every, factors = (values.where(~(values.abs() < smallest), 0) for values in (every, factors))
    expected = (every.float() * factors.float().view(-1, 1)).to(of_dtype)
    computed, expected = (values.where(~(values.abs() <= smallest), 0) for values in (computed, expected))
    return int(((computed != expected) & ~(computed.isnan() & expected.isnan())).sum())


def _cases() -> Iterator[tuple[Algorithm, str, ConvProblem]]:
    geometries = product(Operation, MemoryFormat, _GEOMETRIES)
    for (operation, memory_format, name), (algorithm, r, stride), dtype in product(geometries, _algorithms(), DTYPES):
        if not _takes(algorithm, name):
            continue
        problem = ConvProblem(
            operation,
            **_GEOMETRIES[name],
            r=r,
            s=r,
            stride=stride,
            padding=(r // 2, 1) if r > 1 else (0, 0),
            dtype=dtype,
            memory_format=memory_format,
        )
        yield algorithm, f"{algorithm.name} {operation} {memory_format} {name} {stride[0]} {dtype}", problem


def _takes(algorithm: Algorithm, name: str) -> bool:
    """Tell whether it is made for these channels, in any build."""
    if algorithm == compiled.POINTWISE:
        return name != "depthwise"
    if algorithm == compiled.DEPTHWISE:
        return "groups" in _GEOMETRIES[name]
    return True


def _algorithms() -> Iterator[tuple[Algorithm, int, Pair]]:
    """With the size and the stride of the filter."""
    yield from ((algorithm, algorithm.r, (algorithm.stride, algorithm.stride)) for algorithm in winograd.ALGORITHMS)
    yield from ((compiled.POINTWISE, 1, (stride, 1)) for stride in (1, 2))
    direct = (compiled.IMPLICIT_GEMM, compiled.DEPTHWISE, compiled.LOOP_NEST)
    yield from ((algorithm, 3, (2, 1)) for algorithm in direct)


MULTIPLIES_PAIRS = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
PRODUCTS = {  # of each build, beside those that this processor has
    "avx512": ("floats", "emulated-tiles") if MULTIPLIES_PAIRS else (),  # emulated tiles are made of pairs
    "avx2": (),
    "plain": (),
}
NAMES = [one.name for one in (*winograd.ALGORITHMS, *compiled.ALGORITHMS, compiled.LOOP_NEST)]
TOLERANCE = 1e-5
TOLERANCES = DEFAULT_MAX_RELATIVE_ERROR | {"float32": TOLERANCE}
PROBLEM = ConvProblem(Operation.FORWARD, c=5, h=9, w=8, k=7, r=3, s=3, padding=(1, 1))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """By the name of the build that was asked for: all that this processor can run, and torch.

    Each build also runs with other products of bfloat16 than this processor's, as in ``avx512 floats``.
    """
    compile_builds()
    folder = tmp_path_factory.mktemp("builds")
    best = loaded_build().name
    names = [*(BUILDS[BUILDS.index(best) :] if best in BUILDS else ()), "torch"]
    running = {name: _start(name, folder / name) for name in names}
    running |= {
        f"{name} {products}": _start(name, folder / f"{name} {products}", products)
        for name in names
        for products in PRODUCTS.get(name, ())
    }
    for name, process in running.items():
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"{name}: {errors}"
    return {name: Results(**torch.load(folder / name)) for name in running}


def _start(build: str, file: Path, products: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"MUCUDNN_BUILD": build, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if products:
        environment["MUCUDNN_PRODUCTS"] = products
    return subprocess.Popen([sys.executable, __file__, file], env=environment, stderr=subprocess.PIPE, text=True)


def tolerance(case: str) -> float:
    return TOLERANCES[case.split()[-1]]


def of_build(results: dict[str, Results], build: str) -> Results:
    if build not in results:
        pytest.skip(f"this processor does not run {build}, or nothing is compiled")
    if results[build].build != build.partition(" ")[0]:
        pytest.skip(f"{build} was not built")
    return results[build]


@pytest.mark.parametrize(
    "build", [*BUILDS, *(f"{build} {products}" for build in BUILDS for products in PRODUCTS[build])]
)
def test_every_build_computes_the_convolution(results: dict[str, Results], build: str) -> None:
    errors = of_build(results, build).errors
    assert {case: error for case, error in errors.items() if not error <= tolerance(case)} == {}
    assert len(errors) >= len(Operation) * len(DTYPES)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one build")
@pytest.mark.parametrize(("build", "registers"), [("plain", "x"), ("avx2", "xy"), ("avx512", "xyz")])
@pytest.mark.usefixtures("results")
def test_no_build_has_code_of_a_larger_instruction_set(build: str, registers: str) -> None:
    """The builds have the same sources: an object of one must not be linked into the library of another."""
    path = Path(library.__file__).with_name(f"_{build}.so")
    code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
    assert {*re.findall(r"%([xyz])mm\d", code)} == {*registers}


@pytest.mark.parametrize("build", BUILDS)
def test_every_build_reads_every_half_and_rounds_as_torch_does(results: dict[str, Results], build: str) -> None:
    unlike = of_build(results, build).unlike
    assert len(unlike) == len(HALF) * len(MemoryFormat) * len(CHANNELS)
    assert set(unlike.values()) == {0}, unlike


@pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_subnormal_halves_are_kept_where_subnormal_floats_are_flushed(memory_format: MemoryFormat) -> None:
    torch.set_num_threads(1)  # flushing is of each thread
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert unlike_products("float16", memory_format, channels=1) == 0
    finally:
        torch.set_flush_denormal(False)


def test_torch_s_operators_are_all_there_is_where_that_is_asked_for(results: dict[str, Results]) -> None:
    assert results["torch"].build == "torch"
    reason = "MUCUDNN_BUILD=torch selects torch's operators"
    assert results["torch"].reasons == dict.fromkeys(NAMES, reason)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one build, with everything")
@pytest.mark.usefixtures("results")
def test_what_a_build_leaves_out_is_refused_by_name() -> None:
    program = (
        "from mucudnn.kernels.registry import algorithm; from mucudnn.core.problem import ConvProblem, Operation;"
        "algorithm('winograd-4x4').workspace(ConvProblem(Operation.FORWARD, 5, 9, 8, 7, 3, 3), 1)"
    )
    environment = os.environ | {"MUCUDNN_BUILD": "plain", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "UnavailableError: the build plain for this processor does not have winograd" in done.stderr


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MUCUDNN_BUILD", raising=False)
    monkeypatch.setattr(library, "_path", lambda build: None)
    loaded_build.cache_clear()
    yield
    loaded_build.cache_clear()


@pytest.mark.usefixtures("nothing_built")
def test_where_nothing_was_built_implicit_gemm_says_why() -> None:
    reason = compiled.IMPLICIT_GEMM.supports(PROBLEM)
    assert reason is not None
    assert "plain was compiled when mucudnn was installed; install the wheel" in reason
    assert loaded_build().name == "torch"


def test_a_build_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update without a new build: what Python mirrors of C++ may have changed."""
    if loaded_build().library is None:
        pytest.skip("nothing is compiled")
    monkeypatch.setattr(library, "_LARGEST_SIZE", 2**31)
    library.loaded_build.cache_clear()
    try:
        assert "it was built from other sources; build it again" in library.loaded_build().why_not_compiled
    finally:
        library.loaded_build.cache_clear()


if __name__ == "__main__":
    torch.save(vars(compute()), Path(sys.argv[1]))
