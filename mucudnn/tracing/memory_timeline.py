"""The memory of one training step, operator by operator: data only, made by ``training_step``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mucudnn.words.problem import ConvProblem, Operation

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Event:
    """One operator of the step, and the bytes in use when it ends: its operands and its results are among them.

    transient_bytes: what a convolution needs on top while it runs, as far as tensors tell; see ``ConvolutionCall``.
    """

    operator: str
    live_bytes: int
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """One operation of one call of a module; the operation is that of ``problem``.

    in_use_bytes: all that is in use while the operation runs, without any workspace: its own result, and copies of
    those operands that do not lie in the problem's memory format, included. event: index of the operator that ran it;
    dx and dw of torch's own backward operator share one.
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
    """The operators of one training step in the order in which they ran, and the convolutions among them.

    base_bytes: parameters, buffers and input; it is in every number. real_because: why the step was run on real
    tensors, ``None`` if on fake ones (no memory, no arithmetic).
    """

    base_bytes: int
    events: tuple[Event, ...]
    calls: tuple[ConvolutionCall, ...]
    real_because: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use, without workspaces and what libraries allocate inside an operator."""
        return max((event.live_bytes + event.transient_bytes for event in self.events), default=self.base_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; bytes."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}

    def to_frame(self) -> pandas.DataFrame:
        """Make a table of one row a call of a convolution: module, geometry, bytes in use, index of its event."""
        import pandas

        rows = [{"name": call.name} | asdict(call.problem) | _numbers(call) for call in self.calls]
        return pandas.DataFrame(rows)


def _numbers(call: ConvolutionCall) -> dict[str, int]:
    return {"batch_size": call.batch_size, "in_use_bytes": call.in_use_bytes, "event": call.event}
