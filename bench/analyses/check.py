"""Checks PyTorch's own convolutions in a model for wrong results, crashes, hangs and slowness, in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.table import Table

from mucudnn.bench.report.tables import new_table
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.kernels.registry import algorithm, as_called
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import BarredError, Proof
from mucudnn.measuring.proving.prover import Prover
from mucudnn.measuring.timing.peak_rate import peak_flops_per_s
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import format_seconds

_SLOW = 20.0  # Slower calls, as a multiple of the time of the arithmetic at float32's peak rate, count as slow.
_FORMATS = {MemoryFormat.CONTIGUOUS: "contiguous_format", MemoryFormat.CHANNELS_LAST: "channels_last"}
_CALL_S = 0.1  # allowance per call for heap checks and a busy machine


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking PyTorch's own algorithm for one operation of a layer, called as in a training step.

    is_users: whether the memory format is that of the model. result: the proof that the algorithm is correct, or the
    error that forbids its use. arithmetic_s: seconds of the operation's arithmetic at the machine's peak rate in
    float32.
    """

    layer: Layer
    problem: ConvProblem
    is_users: bool
    result: Proof | Exception
    arithmetic_s: float

    @property
    def verdict(self) -> str:
        """The verdict on the algorithm: right, slow, wrong, dies, hangs, fails, or not proven."""
        if isinstance(self.result, Proof):
            return "slow" if self.result.time_s > _SLOW * self.arithmetic_s + _CALL_S else "right"
        return self.result.fault.value if isinstance(self.result, BarredError) else "not proven"

    @property
    def is_fault(self) -> bool:
        """Whether the algorithm is wrong, crashes, hangs or fails."""
        return isinstance(self.result, BarredError)

    @property
    def details(self) -> str:
        """The algorithm's numerical error and time, or a description of its fault."""
        if not isinstance(self.result, Proof):
            return str(self.result)
        times = f", {self.result.time_s / self.arithmetic_s:.0f} times float32's arithmetic" * (self.verdict == "slow")
        return f"relative error {self.result.relative_error:.1e}, {format_seconds(self.result.time_s)}{times}"

    def reproducer(self) -> str:
        """Return a program in plain torch that reproduces this finding, as lines of code."""
        problem, n = self.problem, self.layer.batch_size
        shapes = {"x": problem.x_shape(n), "w": problem.w_shape(), "dy": problem.y_shape(n)}
        geometry = f"{[*problem.stride]}, {[*problem.padding]}, {[*problem.dilation]}"
        if problem.operation is Operation.FORWARD:
            del shapes["dy"]
            bias = f"x.new_zeros({problem.k})" if self.layer.has_bias else "None"
            call = f"torch.conv2d(x, w, {bias}, {geometry}, {problem.groups})"
        else:
            index = (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER).index(problem.operation)
            mask = [index == 0, index == 1, False]
            call = (
                "torch.ops.aten.convolution_backward("
                f"dy, x, w, None, {geometry}, False, [0, 0], {problem.groups}, {mask})[{index}]"
            )
        names = ", ".join(shapes)
        stored = f"torch.{problem.dtype}, memory_format=torch.{_FORMATS[problem.memory_format]}"
        return "\n".join(
            (
                "import torch",
                f"def compute({names}): return {call}",
                *(f"{name} = torch.randn({[*shape]}).to({stored})" for name, shape in shapes.items()),
                f"result = compute({names})",
                f"exact = compute({', '.join(f'{name}.double().contiguous()' for name in shapes)})",
                "print((result.double() - exact).norm() / exact.norm().clamp(min=1e-30))",
            )
        )


def findings_table(source: str, findings: Iterable[Finding]) -> Table:
    """Return a table of findings on PyTorch's own convolutions in a model."""
    table = new_table(source, ("layer", "convolution"), ("batch", "verdict", "what was seen"))
    for finding in findings:
        names = f"{finding.layer.name}{'' if finding.is_users else ' (other memory format)'}"
        table.add_row(*(names, str(finding.problem), str(finding.layer.batch_size), finding.verdict, finding.details))
    return table


def check(table: LayerTable, prover: Prover, progress: Progress = silent) -> Iterator[Finding]:
    """Check torch's own algorithm in undivided calls, for each operation of each layer, and yield the findings.

    Each operation is checked in both memory formats.
    """
    own = as_called(algorithm(TORCHS_OWN))
    problems = table.problems(tuple(Operation))
    for number, (layer, problem) in enumerate(problems):
        progress(f"{layer.name}: {problem.operation}", number / len(problems))
        for memory_format in sorted(MemoryFormat, key=lambda one: one is not problem.memory_format):
            stored = replace(problem, memory_format=memory_format)
            candidate = Candidate(stored, own, layer.batch_size)
            arithmetic_s = stored.flops(layer.batch_size) / peak_flops_per_s("cpu", "float32")
            is_users = memory_format is problem.memory_format
            for _ in range(3):  # slow calls are retried: the first may include setup, and the machine may be busy
                (result,) = prover.prove(
                    [candidate], layer.batch_size, "cpu", checks_samples=True, has_bias=layer.has_bias
                )
                finding = Finding(layer, stored, is_users, result, arithmetic_s)
                if finding.verdict != "slow":
                    break
            yield finding
