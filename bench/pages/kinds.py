"""The kinds of pictures of a result folder, with the names that commands and recipes use.

This module imports nothing, to keep --help fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MOST_SUBJECTS = 6  # At most this many subjects are drawn side by side: those on which PyTorch takes longest.
MOST_PIECES = 16  # Longer sequences of equal micro-batches are drawn as one piece.
CANDIDATES = "candidates.jsonl, which bench deepbench and bench network write"
_PROBLEMS = "rows of convolutions with all columns of their problems"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of picture of a result folder.

    title: heading of the picture. summary: its line in the list of all kinds. caption: how to read the picture. needs:
    the data that a result folder must contain for it.
    """

    title: str
    summary: str
    caption: str
    needs: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "speedups": Kind(
            "Speedup of each layer, by workspace limit",
            "speedup over PyTorch of each layer, under each workspace limit",
            "PyTorch's time over ours, on a logarithmic scale; right of the line is faster. Bars are 95 % intervals "
            "over rounds.",
            f"{_PROBLEMS}, with torch and another contestant",
        ),
        "divided": Kind(
            "What dividing gains, by workspace limit",
            "speedup of each layer over the best undivided; the authors' own bars beside",
            "Time of the best undivided algorithm over that of the divided mini-batch under the same workspace limit, "
            "all operations of a layer together; lines are 95 % intervals over rounds. Published elsewhere: bars that "
            "the authors of μ-cuDNN show in github.com/spcl/ucudnn for the same geometry, N = 256, on a "
            "P100-SXM2, read to 0.01; they do not say which operations were summed.",
            f"{_PROBLEMS}, with undivided and mucudnn under the same limit, as bench deepbench has them",
        ),
        "limits": Kind(
            "How far from the machine's limit",
            "rates against the machine's limits, and time over them by kind of layer",
            "Left: the rate of each row against the operations for each byte that must move; the line is the machine's "
            "limit (the roofline of Williams, Waterman, Patterson 2009), which Winograd and FFT can pass. Right: time "
            "over that limit; each box has half of the rows of its kind of layer, with the median inside, the whiskers "
            "have all.",
            f"{_PROBLEMS}, and machine_limits in environment.json",
        ),
        "samples": Kind(
            "Samples of each contestant",
            "every sample of each contestant, for the operations that take PyTorch longest",
            f"The {MOST_SUBJECTS} operations that take PyTorch longest: every sample is a point, violins show where "
            "they lie, boxes have half of them. mucudnn plot samples DIR --layer NAME draws those of any layer.",
            "rows with samples",
        ),
        "algorithms": Kind(
            "Samples of each algorithm",
            "every sample of each algorithm on the undivided mini-batch",
            "The whole mini-batch by each algorithm, without what is done once a call, for the "
            f"{MOST_SUBJECTS} operations that take PyTorch longest: points are samples, violins show where they lie, "
            "boxes have half of them.",
            f"{CANDIDATES}, with samples: what the database knew already has none",
        ),
        "cuts": Kind(
            "How the mini-batch is cut",
            "how the mini-batch of each layer is cut",
            "Each bar is a mini-batch, each piece of it a micro-batch, in the order in which they run; colours are "
            f"algorithms. More than {MOST_PIECES} equal micro-batches in a row are drawn as one piece.",
            f"{_PROBLEMS}, with configurations that were chosen under a policy that divides",
        ),
        "desirable": Kind(
            "Desirable sets: what workspace buys",
            "time against workspace of the best configurations, undivided and divided",
            f"The {MOST_SUBJECTS} operations that take PyTorch longest. The line is the desirable set: no "
            "configuration has less time with as much workspace. Squares are algorithms on the undivided mini-batch, "
            "the grey one PyTorch's own. Times are sums of measured parts.",
            CANDIDATES,
        ),
        "micro-batches": Kind(
            "Time against micro-batch size",
            "time of a sample against the micro-batch size, by algorithm",
            f"The {MOST_SUBJECTS} operations that take PyTorch longest: one micro-batch by each algorithm, "
            "without what is done once a call, over its number of samples. Where a line falls, small "
            "micro-batches cost.",
            f"{CANDIDATES}, of algorithms at more than one micro-batch size: take a --batch of 2 or more, and a "
            "--policy that divides",
        ),
        "budget": Kind(
            "Who got how much of the workspace budget",
            "what a workspace budget buys, and who got how much of it",
            "Left: the least time of all problems that share the budget, solved from measured parts. Right: the "
            "segment of each problem, and what its next faster configuration needs more.",
            f"{CANDIDATES}, of a run with --workspace-budget",
        ),
        "memory": Kind(
            "Memory of each layer",
            "activations, parameters and workspace of each layer",
            "Bytes of the layer's output, of its filter, and of the largest workspace of its operations; inputs are "
            "outputs of other layers.",
            f"{_PROBLEMS}, with workspaces",
        ),
        "errors": Kind(
            "Error of each algorithm",
            "relative error of each algorithm against float64",
            "Relative L2 error of each algorithm against float64, a point for each problem; the lines are medians. "
            "Crosses are barred by their error.",
            CANDIDATES,
        ),
        "tuning": Kind(
            "Time of tuning, by policy",
            "time of tuning and of solving, by policy and limit",
            "Sums over all problems, in the order in which they ran: what was measured for one choice is not measured "
            "again for the next, so that each bar begins where the one before it ends. Right: of these the solver's.",
            "rows with tuning_s or solve_s, as bench deepbench writes them",
        ),
    }
)
