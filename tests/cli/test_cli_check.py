"""``mucudnn check``: torch's own convolutions of a model, proven; what is wrong, and the lines that show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.command_line import invoke

from mucudnn.bench.analyses.check import Finding
from mucudnn.bench.sources.layers import Layer
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import BarredError, Fault, Proof, UnprovenError
from mucudnn.measuring.proving import prover as proving
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

PROBLEM = ConvProblem(Operation.FORWARD, c=3, h=6, w=6, k=4, r=3, s=3)
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
                finding = Finding(Layer(("conv",), PROBLEM, 3), problem, True, BARRED, 1e-6)
                scope: dict[str, torch.Tensor] = {}
                lines = finding.reproducer().splitlines()
                exec("\n".join(lines[:-1]), scope)
                written = {"forward": problem.y_shape(3), "backward_data": problem.x_shape(3)}
                assert scope["result"].shape == written.get(operation, problem.w_shape())
                assert scope["x"].is_contiguous(memory_format=TORCH_FORMATS[memory_format])
                error = (scope["result"].double() - scope["exact"]).norm() / scope["exact"].norm()
                assert error < 0.02


def test_verdicts() -> None:
    results = {"right": RIGHT, "dies": BARRED, "not proven": UnprovenError("no process"), "slow": Proof(1e-7, 0, 9.0)}
    for verdict, result in results.items():
        finding = Finding(Layer(("conv",), PROBLEM, 3), PROBLEM, True, result, 1e-6)
        assert finding.verdict == verdict
        assert finding.is_fault == (verdict == "dies")
