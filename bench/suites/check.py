"""Checks PyTorch's own convolutions in a model for wrong results, crashes, hangs and slowness, in another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_seconds
from mucudnn.kernels.memory import torch_format
from mucudnn.kernels.registry import algorithm, as_called
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.clocks import peak_flops_per_s
from mucudnn.measuring.proofs import BarredError, Proof
from mucudnn.measuring.proving.prover import Prover

_SLOW = 20.0  # Slower calls, as a multiple of the time of the arithmetic at float32's peak rate, count as slow.
_CALL_S = 0.1  # allowance per call for heap checks and a busy machine


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking PyTorch's own algorithm for one operation of a layer, called as in a training step.

    is_users: whether the memory format is that of the model.
    verdict: right, slow, not proven, or a fault: wrong, dies, hangs or fails.
    details: error and time, or a description of the fault.
    """

    layer: Layer
    problem: ConvProblem
    is_users: bool
    verdict: str
    details: str

    def reproducer(self) -> str:
        """Return a program in plain torch that reproduces this finding, as lines of code."""
        problem, n = self.problem, self.layer.batch_size
        shapes = {"x": problem.x_shape(n), "w": problem.w_shape(), "dy": problem.y_shape(n)}
        geometry = f"{[*problem.stride]}, {[*problem.padding]}, {[*problem.dilation]}"
        if problem.operation is Operation.FORWARD:
            del shapes["dy"]
            bias = f"x.new_zeros({problem.k})" if self.layer.has_bias else "None"
            call = f"torch.conv{len(problem.stride)}d(x, w, {bias}, {geometry}, {problem.groups})"
        else:
            index = (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER).index(problem.operation)
            zeros, mask = [0 for _ in problem.stride], [index == 0, index == 1, False]
            arguments = f"dy, x, w, None, {geometry}, False, {zeros}, {problem.groups}, {mask}"
            call = f"torch.ops.aten.convolution_backward({arguments})[{index}]"
        stored = f"torch.{problem.dtype}, memory_format={torch_format(problem)}"
        operands = (f"{name} = torch.randn({[*shape]}).to({stored})\n" for name, shape in shapes.items())
        exact = ", ".join(f"{name}.double().contiguous()" for name in shapes)
        return (
            f"import torch\ndef compute({', '.join(shapes)}): return {call}\n{''.join(operands)}"
            f"result = compute({', '.join(shapes)})\nexact = compute({exact})\n"
            "print((result.double() - exact).norm() / exact.norm().clamp(min=1e-30))"
        )


def check(table: LayerTable, prover: Prover, progress: Progress = silent) -> Iterator[Finding]:
    """Check torch's own algorithm in undivided calls, for each operation of each layer, in both memory formats."""
    problems = table.problems(tuple(Operation))
    for number, (layer, problem) in enumerate(problems):
        progress(f"{layer.name}: {problem.operation}", number / len(problems))
        for memory_format in sorted(MemoryFormat, key=lambda name: name is not problem.memory_format):
            stored = replace(problem, memory_format=memory_format)
            yield Finding(layer, stored, stored == problem, *_judged(stored, layer, prover))


def _judged(problem: ConvProblem, layer: Layer, prover: Prover) -> tuple[str, str]:
    candidate = Candidate(problem, as_called(algorithm(TORCHS_OWN)), layer.batch_size)
    arithmetic_s = problem.flops(layer.batch_size) / peak_flops_per_s("cpu", "float32")
    for _ in range(3):  # slow calls are retried: the first may include setup, and the machine may be busy
        (result,) = prover.prove([candidate], layer.batch_size, "cpu", has_bias=layer.has_bias)
        if not isinstance(result, Proof):
            return result.fault.value if isinstance(result, BarredError) else "not proven", str(result)
        details = f"relative error {result.relative_error:.1e}, {format_seconds(result.time_s)}"
        if result.time_s <= _SLOW * arithmetic_s + _CALL_S:
            return "right", details
        details += f", {result.time_s / arithmetic_s:.0f} times float32's arithmetic"
    return "slow", details
