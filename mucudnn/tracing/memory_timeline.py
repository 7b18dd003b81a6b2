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
    """One operation of one call of a module; the operation is that of ``problem``.

    in_use_bytes: bytes in use while the operation runs, without any workspace, including its result and copies of
    operands that are not in the problem's memory format. event: index of the operator that ran it; dx and dw of torch's
    own backward operator share one.
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
        """Most bytes in use, without workspaces and memory that libraries allocate inside an operator."""
        return max((event.live_bytes + event.transient_bytes for event in self.events), default=self.base_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``, sizes in bytes."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}

    def to_frame(self) -> pandas.DataFrame:
        """Return a row for each call of a convolution: module, geometry, bytes in use, index of its event."""
        import pandas

        rows = [{"name": call.name} | asdict(call.problem) | _numbers(call) for call in self.calls]
        return pandas.DataFrame(rows)


def _numbers(call: ConvolutionCall) -> dict[str, int]:
    return {"batch_size": call.batch_size, "in_use_bytes": call.in_use_bytes, "event": call.event}
