"""``mucudnn doctor`` on made-up machines with and without a GPU, its driver, cuDNN and CuPy; ``mucudnn check``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.clock.shared_machine import SharedProcessors
from support.command_line import invoke
from support.cudnn.backend import FakeBackend
from support.snapshots import assert_as_stored

from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.check import Finding, check
from mucudnn.cli import doctor
from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels import registry
from mucudnn.kernels.compiled import library
from mucudnn.kernels.cudnn import library as cudnn_library
from mucudnn.kernels.memory import TORCH_FORMATS
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import BarredError, Fault, Proof, UnprovenError
from mucudnn.measuring.proving import prover as proving
from mucudnn.measuring.whole_runs import Machine


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs with cuDNN and a driver that nvidia-smi names; the devices that were made current."""
    current: list[int] = []

    @contextmanager
    def made_current(index: int) -> Iterator[None]:
        current.append(index)
        yield

    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30, major=9, minor=0)
    library = SimpleNamespace(version_text="9.19.0", path="/lib/libcudnn.so.9")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(cudnn_library, "library", lambda: library)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.65.06\n580.65.06\n"))
    monkeypatch.setattr(registry, "cudnn_backend", FakeBackend)
    return current


@pytest.fixture(autouse=True)
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)


def state(name: str) -> str:
    return dict(doctor.accelerators())[name]


def test_gpus_are_told_with_what_computes_on_them_in_lines_of_100_columns(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "machine", lambda: [("CPU", "made up")])
    some = [registry.algorithm(name) for name in ("native", "gemm")]
    monkeypatch.setattr(registry, "algorithms", lambda device_type="cpu": some)
    output = invoke("doctor").output
    assert_as_stored("doctor", output)
    assert gpus == [0, 1]
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.usefixtures("gpus")
def test_a_gpu_without_cudnn_has_the_other_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> FakeBackend:
        raise UnavailableError("there is no cuDNN: it is gone; install a CUDA build of torch")

    monkeypatch.setattr(cudnn_library, "library", missing)
    monkeypatch.setattr(registry, "cudnn_backend", missing)
    assert state("cuDNN") == "none: there is no cuDNN: it is gone; install a CUDA build of torch"
    assert "native" in state("cuda:0")
    assert state("cuda:0").endswith("none of cuDNN")


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert state("GPU").startswith("none: torch can use no GPU: Found no NVIDIA driver on your system.")
    assert "see nvidia-smi" in state("GPU")


@pytest.mark.usefixtures("gpus")
def test_a_cupy_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file\nand much more")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert state("CuPy") == "none: pip install cupy-cuda12x"
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "import_module", broken)
    reason = "cannot be imported: libcuda.so.1: cannot open shared object file"
    assert state("CuPy") == f"{reason}; fix that, or pip install cupy-cuda12x"
    monkeypatch.setattr(doctor, "import_module", lambda name: SimpleNamespace(__version__="14.2.0"))
    assert state("CuPy") == "14.2.0"


def test_what_is_not_compiled_is_not_listed_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Machine.current`` is where all tuning begins."""
    library.loaded_build.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.delenv("MUCUDNN_BUILD", raising=False)
            patched.setattr("mucudnn.core.errors._said", set())
            patched.setattr("mucudnn.running.eager.hot_path.extension", None)
            patched.setattr(library, "builds", lambda: ())
            told, listed = doctor.compiled(), doctor.usable("cpu")
            missing = "fast algorithms for this CPU are missing: no build for "
            with pytest.warns(RuntimeWarning, match=missing) as warned:
                machine, _ = Machine.current(), Machine.current()
            patched.setenv("MUCUDNN_BUILD", "torch")
            library.loaded_build.cache_clear()
            patched.setattr("mucudnn.core.errors._said", set())
            Machine.current()  # without a warning, since it is wanted
    finally:
        library.loaded_build.cache_clear()
    assert len(warned) == 1
    assert told.startswith("none, so that only algorithms on PyTorch's operators run: no build for ")
    assert "pip install --force-reinstall --no-deps .; calls go through Python" in told
    names = [one.name for one in machine.algorithms]
    assert listed == [name for name in names if not re.search("winograd|implicit|wise|nest", name)]
    if not (library.shortcoming() or os.environ.get("MUCUDNN_BUILD")):
        assert doctor.usable("cpu") == names


def test_of_the_database_it_says_what_tuning_would_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text("no database " * 99, encoding="utf-8")
    for variable, value, said in (
        ("MUCUDNN_DATABASE", text, "text is not an SQLite database; it is left unchanged"),
        ("MUCUDNN_DATABASE", "/proc/none/x.sqlite", "x.sqlite does not exist, and cannot be created in that folder"),
        ("MUCUDNN_DATABASE", tmp_path / "new.sqlite", "new.sqlite"),
        ("XDG_CACHE_HOME", "/proc/none", "cannot be created: measurements are lost when this process ends"),
    ):
        monkeypatch.delenv("MUCUDNN_DATABASE", raising=False)
        monkeypatch.setenv(variable, str(value))
        monkeypatch.setattr("mucudnn.core.errors._said", set())
        told = doctor.database()
        assert told.startswith(str(value))
        assert said in told


def test_more_threads_than_cores_have_a_remedy() -> None:
    assert doctor.threads(2, 2.0) == "2; this process may use 2 cores"
    found = doctor.threads(4, 1.0)
    assert found.startswith("4; this process may use 1 core: torch uses 4 threads")
    assert found.endswith("call torch.set_num_threads(1) first, or set OMP_NUM_THREADS=1")


def test_the_load_is_told_with_a_remedy() -> None:
    assert doctor.load(SharedProcessors(others=0.0).watch()) == "quiet"
    assert doctor.load(SharedProcessors(others=0.6).watch()) == (
        "others take 60% of a core; end other processes, or measure later"
    )


# ``mucudnn check``: torch's own convolutions of a model, proven; what is wrong, and the lines that show it.


SMALL = ConvProblem(Operation.FORWARD, c=3, h=6, w=6, k=4, r=3, s=3)
BARRED = BarredError("it ends the process: SIGSEGV", Fault.DIES)
RIGHT = Proof(1e-7, 0, 1e-4)
SOURCE = "c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n3,6,6,4,3,3,0,0,1,1\n"


class Answering:
    """A prover that bars one memory format, and is slow in one operation."""

    def __init__(self, barred: MemoryFormat | None, slow: Operation | None = None) -> None:
        self.barred, self.slow = barred, slow

    def prove(self, candidates: list[Candidate], *_: object, **__: object) -> list[Proof | Exception]:
        (candidate,) = candidates
        if candidate.problem.memory_format is self.barred:
            return [BARRED]
        return [Proof(1e-7, 0, 1e3) if candidate.problem.operation is self.slow else RIGHT]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "layers.csv"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("prover", "status", "words"),
    [
        (Answering(None), 0, "6 of 6 right"),
        (Answering(MemoryFormat.CHANNELS_LAST), 0, "(other memory format)"),
        (Answering(MemoryFormat.CONTIGUOUS), 1, "it ends the process: SIGSEGV"),
        (Answering(None, Operation.BACKWARD_FILTER), 0, "times float32's arithmetic"),
    ],
)
def test_the_status_tells_of_the_form_that_the_model_runs(
    prover: Answering, status: int, words: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "prover", lambda: prover)
    result = invoke("check", source, "--batch", "2")
    assert result.exit_code == status, result.output
    assert words in result.stdout


def test_it_proves_a_model_for_real(source: str) -> None:
    """What is right may be slow on a busy machine, but not wrong: these forms are run everywhere."""
    result = invoke("check", source, "--batch", "2")
    assert result.exit_code == 0, result.output
    assert not {"dies", "wrong", "hangs", "not proven"} & set(result.stdout.split())


def test_lines_of_plain_torch_show_each_finding() -> None:
    for operation in Operation:
        for memory_format in MemoryFormat:
            for dtype in ("float32", "bfloat16"):
                problem = ConvProblem(
                    operation, 4, 7, 6, 6, 3, 2, (2, 1), (1, 0), (1, 2), 2, dtype, memory_format=memory_format
                )
                finding = Finding(Layer(("conv",), SMALL, 3), problem, True, "dies", "")
                scope: dict[str, torch.Tensor] = {}
                lines = finding.reproducer().splitlines()
                exec("\n".join(lines[:-1]), scope)
                written = {"forward": problem.y_shape(3), "backward_data": problem.x_shape(3)}
                assert scope["result"].shape == written.get(operation, problem.w_shape())
                assert scope["x"].is_contiguous(memory_format=TORCH_FORMATS[memory_format])
                error = (scope["result"].double() - scope["exact"]).norm() / scope["exact"].norm()
                assert error < 0.02


class Always:
    """A prover with one answer."""

    def __init__(self, result: Proof | Exception) -> None:
        self.result = result

    def prove(self, *_: object, **__: object) -> list[Proof | Exception]:
        return [self.result]


def test_verdicts() -> None:
    results = {"right": RIGHT, "dies": BARRED, "not proven": UnprovenError("no process"), "slow": Proof(1e-7, 0, 9.0)}
    table = LayerTable("net", (Layer(("conv",), SMALL, 3),))
    for verdict, result in results.items():
        found = list(check(table, Always(result)))  # type: ignore[arg-type]
        assert [one.verdict for one in found] == [verdict] * 6
        assert [one.is_users for one in found] == [True, False] * 3
