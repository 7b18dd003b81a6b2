"""Works together with the other ranks of a torch.distributed process group: exchanges, deals out, agrees.

What is measured and chosen is decided in ``tuning``; what goes over the wire is torch's own.
"""

from mucudnn.distributed.uneven_batches import UnevenBatchSampler, gradient_weight

__all__ = ["UnevenBatchSampler", "gradient_weight"]
