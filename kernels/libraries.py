"""Tells which libraries compute on a device, in which versions, and under which settings.

Versions are part of the key of every measurement.
"""

from __future__ import annotations

import re

import torch

from mucudnn.kernels.compiled.library import build_name


def library_of(device_type: str) -> str:
    """Return the library behind torch's own convolution: ``oneDNN 3.12.0`` on the CPU, ``cuDNN 9.19.0`` on CUDA.

    Raises ``UnavailableError`` where a GPU has none.
    """
    if device_type == "cuda":
        from mucudnn.kernels.cudnn import library as cudnn

        return f"cuDNN {cudnn.library().version_text}"
    return onednn_version(torch.__config__.show())


def compiler_of(device_type: str) -> str:
    """Return what our own code is compiled for on the CPU (``avx512``), or by on CUDA (``CuPy 14.2.0``).

    ``torch`` where nothing of ours is compiled.
    """
    if device_type != "cuda":
        return build_name()
    from mucudnn.kernels.cuda.cupy_launcher import compiler_name

    return compiler_name()


def settings_that_bar() -> tuple[object, ...]:
    """Return torch's settings that bar algorithms on CUDA: less than ``TorchSettings`` has, in a tenth of the time."""
    read = torch._C
    repeatable = read._get_cudnn_deterministic(), read._get_deterministic_algorithms()
    return read._get_cudnn_enabled(), read._get_fp32_precision_getter("cuda", "conv"), *repeatable


def onednn_version(torch_config: str) -> str:
    """Find ``oneDNN 3.12.0`` in torch's description of its build, where oneDNN goes by its former name."""
    match = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch_config)
    return f"oneDNN {match.group(1)}" if match else "no oneDNN"
