"""Data-parallel training on torch's process groups.

What goes over the wire is torch's own.
"""

from mucudnn.distributed.uneven_batches import UnevenBatchSampler, gradient_weight

__all__ = ["UnevenBatchSampler", "gradient_weight"]
