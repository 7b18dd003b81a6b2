"""Inference runtimes beside torch: what is installed, calls of models in them, and comparisons of outputs.

ONNX Runtime and OpenVINO read the same file, which torch exports. Both are installed by the extra ``runtimes``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.results.variants import Runtime
from mucudnn.core.errors import UnavailableError

Arrays = list[np.ndarray[Any, Any]]  # the outputs of a model

MOST_DIFFERENCE = 1e-3  # Larger relative differences of float32 outputs count as errors, smaller ones as rounding.
_OF_EXPORT = ("onnx", "onnxscript")
OF_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {Runtime.ONNX_RUNTIME: ("onnxruntime", *_OF_EXPORT), Runtime.OPENVINO: ("openvino", *_OF_EXPORT)}
)
"""The packages of each runtime that is neither torch nor mucudnn, by its name."""


def version_of(runtime: str) -> str:
    """Return the version of the package that implements this runtime; empty if it is not installed."""
    if runtime.startswith("mucudnn"):
        return mucudnn.__version__
    try:
        return version("torch" if runtime.startswith("torch") else runtime)
    except PackageNotFoundError:
        return ""


def require_installed(runtime: str) -> None:
    """Raise ``UnavailableError`` if a package of the runtime is not installed."""
    missing = [package for package in OF_PACKAGES.get(runtime, ()) if find_spec(package) is None]
    if missing:
        raise UnavailableError(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")


def call_by_torch(called: Callable[[Tensor], Any]) -> Callable[[Tensor], Arrays]:
    """Return a function that calls a model of torch and returns its outputs."""
    return lambda x: [leaf.numpy() for leaf in tree_leaves(called(x)) if isinstance(leaf, Tensor)]


def call_by_package(
    runtime: str, model: nn.Module, x: Tensor, threads: int, *, any_length: bool = False
) -> Callable[[Tensor], Arrays]:
    """Return a function that calls the model in ONNX Runtime or OpenVINO, for inputs of the shape of x.

    any_length: whether the last size of inputs may differ from that of x.

    Raises any error of the export or the runtime.
    """
    call = _onnx_runtime if runtime == Runtime.ONNX_RUNTIME else _openvino
    with TemporaryDirectory() as folder:
        return call(str(_exported(model, x, Path(folder), any_length=any_length)), threads)


def _onnx_runtime(file: str, threads: int) -> Callable[[Tensor], Arrays]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.contiguous().numpy()})


def _openvino(file: str, threads: int) -> Callable[[Tensor], Arrays]:
    import openvino

    core = openvino.Core()
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # The default is bfloat16 on processors that support it.
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(core.read_model(file), "CPU", options)
    request = compiled.create_infer_request()

    def outputs(x: Tensor) -> Arrays:
        results = request.infer([x.contiguous().numpy()], share_inputs=True, share_outputs=True)
        return [results[output] for output in compiled.outputs]

    return outputs


def _exported(model: nn.Module, x: Tensor, folder: Path, *, any_length: bool) -> Path:
    """Write the model as an ONNX file, with the shape of x but perhaps its last size, by torch's graph exporter."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # The exporter warns about missing optional packages.
    file = folder / "model.onnx"
    shapes: Any = ({x.dim() - 1: torch.export.Dim.DYNAMIC},) if any_length else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), file, dynamo=True, verbose=False, dynamic_shapes=shapes)
    return file


def relative_difference(outputs: Arrays, expected: Arrays) -> float:
    """Return the L2 norm of ``outputs - expected`` over that of ``expected``, over all arrays together, in float64.

    The result is infinite if shapes differ, if outputs are not finite, or if ``expected`` is all zeros.
    """
    if [array.shape for array in outputs] != [array.shape for array in expected]:
        return inf
    values, reference = (_joined(arrays) for arrays in (outputs, expected))
    difference, norm = float(np.linalg.norm(values - reference)), float(np.linalg.norm(reference))
    if difference == 0.0:
        return 0.0
    return difference / norm if isfinite(difference) and norm > 0 else inf


def _joined(arrays: Arrays) -> np.ndarray[Any, Any]:
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
