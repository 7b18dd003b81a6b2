"""Names of the runtimes that the inference benchmark compares. Does not import torch."""

from __future__ import annotations

from enum import StrEnum


class Runtime(StrEnum):
    """A way to run a model in inference, such as torch, mucudnn or ONNX Runtime."""

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
    def tells_layers(self) -> bool:
        """Whether the layers of a call can be timed in place: not if a compiler fuses or traces the layers."""
        return self in (Runtime.TORCH, Runtime.MUCUDNN)
