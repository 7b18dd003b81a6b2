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
