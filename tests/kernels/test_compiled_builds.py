"""Every build of the compiled algorithms that this processor runs computes what torch's operators compute."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.build_results import CHANNELS, DTYPES, HALF, Results, unlike_products
from support.places import SUPPORT, compile_builds

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.compiled import library
from mucudnn.kernels.compiled.library import BUILDS, build_name, loaded_build
from mucudnn.kernels.winograd import algorithms as winograd

pytestmark = pytest.mark.slow

PROGRAM = SUPPORT / "build_results.py"
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
    best = build_name()
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
    return subprocess.Popen([sys.executable, PROGRAM, file], env=environment, stderr=subprocess.PIPE, text=True)


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
    assert "plain was not built" in reason
    assert "install again with a C++ compiler" in reason
    assert build_name() == "torch"


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
