"""The proving process: what dies, hangs or is wrong there is told, and does nothing to anybody else."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mucudnn
from mucudnn import BaseAlgorithm
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import FailureKind
from mucudnn.kernels import registry
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import BarredError, Fault, Proof, UnprovenError
from mucudnn.measuring.proving.prover import Prover
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.tuner import tune


@dataclass(frozen=True, slots=True)
class Product(BaseAlgorithm):
    """A forward 1x1 convolution as a product, which needs no workspace; what goes wrong is ``fault``."""

    fault: str = ""
    version: int = 1

    @property
    def name(self) -> str:
        return f"test/{self.fault or 'right'}"

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        y.copy_(torch.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0]))
        if bias is not None:
            y.add_(bias.view(-1, 1, 1))
        match self.fault:
            case "writes-past-its-output":
                ctypes.memset(y.data_ptr() + y.nbytes, 0, 16)
            case "writes-past-a-tensor-of-its-own":
                own = torch.zeros(8)
                ctypes.memset(own.data_ptr() + own.nbytes, 0, 16)
            case "reads-unwritten-memory":
                y.add_(torch.empty_like(y))
            case "aborts":
                os.abort()
            case "dawdles":
                time.sleep(0.1 * len(x))
            case "sleeps":
                time.sleep(3600)
            case "raises":
                raise ValueError("no such thing")
            case "is-killed":
                os.kill(os.getpid(), 9)


pytestmark = pytest.mark.slow

PROBLEM = ConvProblem(Operation.FORWARD, 8, 6, 6, 4, 1, 1)
BATCH = 2
FAULTS = {
    "writes-past-its-output": Fault.WRONG,
    "writes-past-a-tensor-of-its-own": Fault.DIES,
    "reads-unwritten-memory": Fault.WRONG,
    "aborts": Fault.DIES,
    "sleeps": Fault.HANGS,
    "raises": Fault.FAILS,
}


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    """A prover whose process has settings that could hide the reasons, or end it."""
    made = Prover(least_limit_s=5.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONFAULTHANDLER", "1")
        patched.setenv("PYTHONWARNINGS", "error")
        yield made
    made.close()


def verdicts(prover: Prover, *algorithms: object) -> list[Proof | Exception]:
    candidates = [Candidate(PROBLEM, algorithm, BATCH) for algorithm in algorithms]  # type: ignore[arg-type]
    return prover.prove(candidates, BATCH, "cpu")


def test_of_a_batch_each_fault_is_told_and_the_others_are_proven(prover: Prover) -> None:
    own = (NATIVE_ALGORITHM, Product(), NATIVE_OTHER_FORMAT)
    faulty = [Product(fault) for fault in FAULTS]
    first, *found, right, other = verdicts(prover, own[0], *faulty, *own[1:])
    assert all(isinstance(proof, Proof) and proof.relative_error < 1e-6 for proof in (first, right, other))
    assert first.internal_bytes > 0  # type: ignore[union-attr]
    assert {fault: error.fault for fault, error in zip(FAULTS, found, strict=True)} == FAULTS  # type: ignore[union-attr]
    reasons = dict(zip(FAULTS, map(str, found), strict=True))
    assert "it writes 16 bytes behind a block of 32 bytes" in reasons["writes-past-a-tensor-of-its-own"]
    assert "SIGABRT" in reasons["aborts"]
    assert "no such thing" in reasons["raises"]


def test_what_is_slow_in_half_precision_is_tried_on_few_samples(prover: Prover) -> None:
    """20 samples would take 2 s."""
    problem = replace(PROBLEM, dtype="bfloat16")
    candidates = [Candidate(problem, Product(fault), 20) for fault in ("dawdles", "")]
    slow, right = prover.prove(candidates, 20, "cpu")
    assert isinstance(slow, BarredError)
    assert slow.fault is Fault.SLOW
    assert re.match(r"it is too slow to measure: 8 of 20 samples took ", str(slow))
    assert slow.least_s == pytest.approx(2, rel=0.4)
    assert isinstance(right, Proof)


def test_what_cannot_be_sent_is_not_run_and_keeps_nothing_else_from_it(prover: Prover) -> None:
    scope: dict[str, object] = {"__name__": "__main__", "Product": Product, "lock": threading.Lock()}
    exec("class Locked(Product):\n    name = 'test/locked'\n    held = lock\n    __slots__ = ()\n", scope)
    unsent, right = verdicts(prover, scope["Locked"](), Product())  # type: ignore[operator]
    assert isinstance(unsent, UnprovenError)
    assert isinstance(right, Proof)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


@pytest.mark.usefixtures("no_process")
def test_without_a_process_nothing_foreign_is_run_and_the_report_says_so_once() -> None:
    machine = replace(Machine.current(), prover=Prover())
    config = Config(workspace_limit=None, algorithms=("native", "native-other-format"))
    (tuned,) = tune(PROBLEM, BATCH, config, machine=machine).problems
    measured = {m.micro_config for m in tuned.measurements if m.micro_config.algorithm.startswith("native")}
    assert {str(one.algorithm) for one in measured} == {"native"}  # what the user's own step runs anyway
    assert {one.micro_batch_size for one in measured} == {BATCH}
    assert any(failure.kind is FailureKind.UNPROVEN for failure in tuned.failures)


def test_no_plug_in_can_end_tuning_and_the_right_one_is_used(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    faults = ("writes-past-its-output", "aborts", "sleeps")
    for fault in (*faults, ""):
        mucudnn.register(Product(fault))
    names = [Product(fault).name for fault in faults]
    config = Config(workspace_limit=0, algorithms=("test/right", *names))
    machine = replace(Machine.current(), prover=prover)
    (tuned,) = tune(PROBLEM, BATCH, config, machine=machine).problems
    assert tuned.configuration.algorithms == ("test/right",)
    assert {f.micro_config.algorithm for f in tuned.failures if f.is_lasting and not f.is_passed_over} == set(names)


class Dying:
    """A prover that bars torch's own, undivided, as where oneDNN ends the process; all else is proven."""

    error = BarredError("it ends the process: SIGSEGV", Fault.DIES)

    def prove(self, candidates: list[Candidate], *_: object, **__: object) -> list[Proof | Exception]:
        return [self.error if c.algorithm.name == "native" else Proof(1e-7, 0, 1e-3) for c in candidates]

    def start(self, *, waits: bool) -> None: ...

    def rest(self) -> None: ...


def test_where_torchs_own_is_barred_it_is_never_run_and_what_is_right_takes_its_place() -> None:
    def run_torch(*_: object) -> None:
        raise AssertionError("torch's own was run")

    machine = replace(Machine.current(), prover=Dying(), run_torch=run_torch)
    problems = [PROBLEM.with_operation(operation) for operation in Operation]
    for config in (Config(workspace_limit=None), Config(workspace_budget="64MiB")):
        for tuned in tune(problems, BATCH, config, machine=machine).problems:
            assert "native" not in tuned.configuration.algorithms
            assert tuned.barred is not None
            assert "torch's own is barred: native (version 1): it ends the process: SIGSEGV" in tuned.reason
            assert tuned.speedup is None


def test_a_model_in_which_torchs_own_is_barred_is_tuned_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    current = replace(Machine.current(), prover=Dying())
    monkeypatch.setattr(Machine, "current", lambda *_: current)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 4, 1))
    x = torch.randn(BATCH, 8, 6, 6)
    expected = model(x)
    mucudnn.optimize(model, x, Config(confirm=True))
    torch.testing.assert_close(model(x), expected)
    text = str(mucudnn.report(model))
    assert "PyTorch's own is barred in 0 (forward)" in " ".join(text.split())
    assert mucudnn.report(model).confirmation is None


def test_flags_of_python_are_passed_on_and_the_heap_is_checked_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space:and $ORIGIN"
    folder.mkdir()
    (folder / "mucudnn").symlink_to(Path(mucudnn.__file__).parent)
    (folder / "sitecustomize.py").write_text(f"open({str(tmp_path / 'shut out')!r}, 'w')", encoding="utf-8")
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from pathlib import Path; from mucudnn.measuring.proving.prover import prover\n"
        "print(prover().heap_checks())\n"
        "maps = Path(f'/proc/{prover()._process.pid}/maps').read_text()\n"
        "print([name in maps for name in ('_red_zones', 'libc_malloc_debug')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-I", "-X", "dev", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told, loaded = map(ast.literal_eval, done.stdout.splitlines())
    assert loaded == [*told.values()]
    assert loaded[0]
    assert not (tmp_path / "shut out").exists()


def test_a_prover_ends_with_its_process(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "from mucudnn.measuring.proving.prover import prover\n"
        "prover().start()\nprint(prover()._process.pid)\nimport os, sys\nsys.stdout.flush()\nos._exit(1)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    child = int(done.stdout)
    for _ in range(600):
        if not Path(f"/proc/{child}").exists():
            return
        threading.Event().wait(0.1)
    pytest.fail("it goes on alone")
