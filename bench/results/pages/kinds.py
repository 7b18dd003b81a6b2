"""The kinds of pictures of a result folder, with the names of their files. This module imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MOST_SUBJECTS = 6  # At most this many subjects are drawn side by side: those on which PyTorch takes longest.


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of picture of a result folder. caption: how to read it."""

    title: str
    caption: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "speedups": Kind(
            "Speedup of each layer, by workspace limit",
            "PyTorch's time over ours, on a logarithmic scale; right of the line is faster. Bars are 95 % intervals "
            "over rounds.",
        ),
        "divided": Kind(
            "What dividing gains, by workspace limit",
            "Time of the best undivided algorithm over that of the divided mini-batch under the same workspace limit, "
            "all operations of a layer together; lines are 95 % intervals over rounds. Layers that run the same "
            "configuration as the undivided are left out. Published elsewhere: bars that "
            "the authors of μ-cuDNN show in github.com/spcl/ucudnn for the same geometry, N = 256, on a "
            "P100-SXM2, read to 0.01; they do not say which operations were summed.",
        ),
        "limits": Kind(
            "How far from the machine's limit",
            "Left: the rate of each row against the operations for each byte that must move; the line is the machine's "
            "limit (the roofline of Williams, Waterman, Patterson 2009), which Winograd and FFT can pass. Right: time "
            "over that limit; each box has half of the rows of its kind of layer, with the median inside, the whiskers "
            "have all.",
        ),
        "desirable": Kind(
            "Desirable sets: what workspace buys",
            f"The {MOST_SUBJECTS} operations that take PyTorch longest. The line is the desirable set: no "
            "configuration has less time with as much workspace. Squares are algorithms on the undivided mini-batch, "
            "the grey one PyTorch's own. Times are sums of measured parts.",
        ),
        "micro-batches": Kind(
            "Time against micro-batch size",
            f"The {MOST_SUBJECTS} operations that take PyTorch longest: one micro-batch by each algorithm, "
            "without what is done once a call, over its number of samples. Where a line falls, small "
            "micro-batches cost.",
        ),
        "bands": Kind(
            "Time against memory in bands of rows",
            "The line is the least predicted time of a call within each memory of activations and workspace; squares "
            "are measured.",
        ),
    }
)
