"""Communication of ranks that train together, the algorithms of an all-reduce, and the link between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import real, settle


class Communication(StrEnum):
    """Methods of torch that synchronize the ranks of data-parallel training.

    ``ALLREDUCE`` averages gradients in every step. ``FP16`` and ``BF16`` average them in 16 bits, ``POWERSGD`` as
    products of matrices of rank one (Vogels, Karimireddy and Jaggi, 2019). ``POST_LOCAL_SGD`` averages parameters
    instead, once in several steps (Lin et al., 2018). ``HIERARCHICAL_SGD`` averages them more often within groups of
    ranks than over all ranks (Wang et al., 2020).
    """

    ALLREDUCE = "allreduce"
    FP16 = "fp16"
    BF16 = "bf16"
    POWERSGD = "powersgd"
    POST_LOCAL_SGD = "post-local-sgd"
    HIERARCHICAL_SGD = "hierarchical-sgd"

    @property
    def averages_parameters(self) -> bool:
        """Whether the method averages parameters instead of gradients, so that ranks agree only after some steps."""
        return self in (Communication.POST_LOCAL_SGD, Communication.HIERARCHICAL_SGD)


class AllReduce(StrEnum):
    """Algorithms of an all-reduce, which sums an array over all ranks.

    ``RING``: reduce-scatter and all-gather around a ring. ``TREE``: reduce and broadcast over a binomial tree.
    ``BUTTERFLY``: recursive doubling, all data in each exchange. ``RABENSEIFNER``: reduce-scatter by recursive halving,
    all-gather by recursive doubling.
    """

    RING = "ring"
    TREE = "tree"
    BUTTERFLY = "butterfly"
    RABENSEIFNER = "rabenseifner"


@dataclass(frozen=True, slots=True)
class Link:
    """The link that connects a rank to others: latency of a message in seconds, and bandwidth in each direction.

    Raises ``InvalidInputError`` for a negative latency, a bandwidth not above 0, and values that are not finite.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        settle(self, latency_s=real(self.latency_s, "latency_s"), bytes_per_s=real(self.bytes_per_s, "bytes_per_s"))
        if not 0 <= self.latency_s < inf:
            raise InvalidInputError(f"latency_s is {self.latency_s}; it must be at least 0, and finite")
        if not 0 < self.bytes_per_s < inf:
            raise InvalidInputError(f"bytes_per_s is {self.bytes_per_s}; it must be above 0, and finite")
