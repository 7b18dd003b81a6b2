"""Names of the runtimes that are compared in inference. Loads no torch."""

from __future__ import annotations

from enum import StrEnum


class Runtime(StrEnum):
    """A way to run a model in inference."""

    TORCH = "torch"
    TORCH_COMPILE = "torch-compile"  # with frozen parameters
    ONNX_RUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    MUCUDNN = "mucudnn"
    MUCUDNN_COMPILE = "mucudnn-compile"  # both together

    @property
    def is_ours(self) -> bool:
        return self in (Runtime.MUCUDNN, Runtime.MUCUDNN_COMPILE)

    @property
    def is_compiled(self) -> bool:
        return self in (Runtime.TORCH_COMPILE, Runtime.MUCUDNN_COMPILE)

    @property
    def is_in_torch(self) -> bool:
        """Whether layers are called by torch, so that they can be timed in place."""
        return self not in (Runtime.ONNX_RUNTIME, Runtime.OPENVINO)
