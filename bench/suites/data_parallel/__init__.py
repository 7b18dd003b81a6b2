"""Benchmark of data-parallel training: mucudnn's steps against torch's, on the ranks of a process group.

The package ``training`` has steps of a single process; ``scaling`` predicts steps on many ranks.
"""

from enum import StrEnum


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
