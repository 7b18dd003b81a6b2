"""Names and versions of the libraries that compute on a device, which are part of the key of every measurement."""

from __future__ import annotations

import re

import torch

from mucudnn.kernels.compiled.library import build_name


def library_of(device_type: str) -> str:
    """Return the library behind torch's own convolution, such as ``oneDNN 3.12.0`` or, on CUDA, ``cuDNN 9.19.0``.

    Raises ``UnavailableError`` if CUDA is available without cuDNN.
    """
    if device_type == "cuda":
        from mucudnn.kernels.cudnn import library as cudnn

        return f"cuDNN {cudnn.library().version_text}"
    return onednn_version(torch.__config__.show())


def compiler_of(device_type: str) -> str:
    """Return the instruction set of mucudnn's C++ code on the CPU (``avx512``); on CUDA the compiler (``CuPy 14.2``).

    The value ``torch`` means that mucudnn has no compiled code for the device.
    """
    if device_type != "cuda":
        return build_name()
    from mucudnn.kernels.cuda.cupy_launcher import compiler_name

    return compiler_name()


def settings_that_bar() -> tuple[object, ...]:
    """Return the settings of torch that exclude algorithms on CUDA.

    Reading only these settings is ten times faster than ``TorchSettings.current``, which reads all.
    """
    read = torch._C
    repeatable = read._get_cudnn_deterministic(), read._get_deterministic_algorithms()
    return read._get_cudnn_enabled(), read._get_fp32_precision_getter("cuda", "conv"), *repeatable


def onednn_version(torch_config: str) -> str:
    """Parse oneDNN's version, such as ``oneDNN 3.12.0``, from torch's description of its build.

    The description uses oneDNN's former name MKL-DNN.
    """
    match = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch_config)
    return f"oneDNN {match.group(1)}" if match else "no oneDNN"
