"""Records of the memory of a training step, operator by operator, made by ``training_step``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mucudnn.words.problem import ConvProblem, Operation

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Event:
    """One operator of the step, and the bytes in use when it ends, including its operands and results.

    transient_bytes: additional bytes of tensors while a convolution runs; see ``ConvolutionCall``.
    """

    operator: str
    live_bytes: int
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """One operation (y, dx or dw) of one call of a convolution module; ``problem`` describes the operation.

    in_use_bytes: bytes in use while the operation runs, without any workspace, including its result and copies of
    operands that are not in the problem's memory format. event: index of the operator that ran it; dx and dw of torch's
    backward operator have the same event.
    """

    name: str
    problem: ConvProblem
    batch_size: int
    in_use_bytes: int
    event: int

    @property
    def operation(self) -> Operation:
        return self.problem.operation


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The operators of one training step in execution order, and the convolutions among them.

    base_bytes: parameters, buffers and input, included in every number. real_because: why the step was run on real
    tensors, or None if on fake ones, without memory or arithmetic.
    """

    base_bytes: int
    events: tuple[Event, ...]
    calls: tuple[ConvolutionCall, ...]
    real_because: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use during the step, without workspaces and memory allocated inside an operator."""
        return max((event.live_bytes + event.transient_bytes for event in self.events), default=self.base_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as plain values for ``json.dumps``, sizes in bytes."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}

    def to_frame(self) -> pandas.DataFrame:
        """Return a data frame with a row for each convolution call: module, geometry, bytes in use, event index."""
        import pandas

        rows = [{"name": call.name} | asdict(call.problem) | _numbers(call) for call in self.calls]
        return pandas.DataFrame(rows)


def _numbers(call: ConvolutionCall) -> dict[str, int]:
    return {"batch_size": call.batch_size, "in_use_bytes": call.in_use_bytes, "event": call.event}
