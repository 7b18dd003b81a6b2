"""Work of the ranks of a process group together: what tuning sends, and an averager of models for training."""

from __future__ import annotations

from mucudnn.distributed.averaging import SynchronousModelAveraging

__all__ = ["SynchronousModelAveraging"]
