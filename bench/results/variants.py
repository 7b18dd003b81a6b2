"""Names used by benchmarks: variants and precisions of training steps, and inference runtimes. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import parse_bytes, shown

TORCH = "torch"  # name of the baseline contestant in result folders


def shown_name(contestant: str) -> str:
    """Return a contestant's name for headings, with PyTorch in place of ``torch``, which result files use.

    >>> shown_name("torch-benchmark-10"), shown_name("mucudnn")
    ('PyTorch-benchmark-10', 'mucudnn')
    """
    return f"PyTorch{contestant.removeprefix(TORCH)}" if contestant.startswith(TORCH) else contestant


class Variant(StrEnum):
    """A variant of a benchmarked model: torch's or mucudnn's, and whether it is compiled.

    ``TORCH_BENCHMARK``: torch's benchmark mode, which times up to ten engines. ``MUCUDNN_UNGROUPED``: mucudnn's
    convolutions alone, without groups of what stands between them. ``TORCH_COMPILE``, ``MUCUDNN_COMPILE``: the model
    under ``torch.compile``, torch's or mucudnn's.
    """

    TORCH = "torch"
    TORCH_BENCHMARK = "torch-benchmark"
    TORCH_COMPILE = "torch-compile"
    MUCUDNN = "mucudnn"
    MUCUDNN_UNGROUPED = "mucudnn-ungrouped"
    MUCUDNN_COMPILE = "mucudnn-compile"

    @property
    def is_ours(self) -> bool:
        return self in (Variant.MUCUDNN, Variant.MUCUDNN_UNGROUPED, Variant.MUCUDNN_COMPILE)

    @property
    def is_compiled(self) -> bool:
        return self in (Variant.TORCH_COMPILE, Variant.MUCUDNN_COMPILE)


VARIANTS = {  # by type of device
    "cuda": tuple(variant for variant in Variant if variant is not Variant.MUCUDNN_UNGROUPED),  # it has no groups
    "cpu": tuple(variant for variant in Variant if variant is not Variant.TORCH_BENCHMARK),
}


class Runtime(StrEnum):
    """A way to run a model in inference, such as torch, mucudnn or ONNX Runtime."""

    TORCH = "torch"
    TORCH_COMPILE = "torch-compile"  # with frozen parameters
    ONNX_RUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    MUCUDNN = "mucudnn"
    MUCUDNN_COMPILE = "mucudnn-compile"  # mucudnn's convolutions in a compiled model

    @property
    def is_ours(self) -> bool:
        return self in (Runtime.MUCUDNN, Runtime.MUCUDNN_COMPILE)

    @property
    def tells_layers(self) -> bool:
        """Return whether the layers of a call can be timed in place, which fails if a compiler fuses or traces them."""
        return self in (Runtime.TORCH, Runtime.MUCUDNN)


class LengthRuntime(StrEnum):
    """A way to run a model on inputs of many lengths.

    ``TORCH_COMPILE``: compiled for each length, until torch's limit of compilations, from which on it runs as it is.
    ``TORCH_COMPILE_DYNAMIC``: compiled for all lengths at once. ``MUCUDNN``: under ``mucudnn.enable()``.
    ``MUCUDNN_EACH``: some of the lengths, each tuned by itself by ``mucudnn.optimize``, a bound of what is possible.
    """

    TORCH = "torch"
    TORCH_COMPILE = "torch-compile"
    TORCH_COMPILE_DYNAMIC = "torch-compile-dynamic"
    ONNX_RUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    MUCUDNN = "mucudnn"
    MUCUDNN_EACH = "mucudnn-each"

    @property
    def is_compiled(self) -> bool:
        return self in (LengthRuntime.TORCH_COMPILE, LengthRuntime.TORCH_COMPILE_DYNAMIC)


class Saving(StrEnum):
    """A way to run training steps in less memory than torch's own steps need, which are the first.

    ``TORCH_CHECKPOINT``: parts of the model are computed again in the backward pass, by ``torch.utils.checkpoint``.
    ``TORCH_ACCUMULATE``: the gradients of parts of the batch are added. ``TORCH_COMPILE``: the model is compiled, with
    torch's ``activation_memory_budget``.
    """

    TORCH = "torch"
    MUCUDNN = "mucudnn"
    TORCH_CHECKPOINT = "torch-checkpoint"
    TORCH_ACCUMULATE = "torch-accumulate"
    TORCH_COMPILE = "torch-compile"


SAVINGS = tuple(saving for saving in Saving if saving is not Saving.TORCH_COMPILE)  # without minutes of compilation


def budget_bytes(budget: str, step_bytes: int) -> int:
    """Return the bytes of a memory budget, which is a size or a share of ``step_bytes``.

    Raises ``InvalidInputError`` for other text.

    >>> budget_bytes("1/3", 600), budget_bytes("2KiB", 600)
    (200, 2048)
    """
    share = re.fullmatch("([1-9][0-9]{0,2})/([1-9][0-9]{0,2})", budget)
    if share:
        return step_bytes * int(share[1]) // int(share[2])
    size = None
    with suppress(InvalidInputError):
        size = parse_bytes(budget)
    if size is None:
        raise InvalidInputError(
            f"budget is {shown(budget)}; write a share of the memory of PyTorch's step, as 1/3, or a size, as 2GiB"
        )
    return size


class Precision(StrEnum):
    """The precision in which a training step computes.

    ``TF32``: float32, but matrix products and convolutions round their inputs to a mantissa of 10 bits. ``BFLOAT16``,
    ``FLOAT16``: autocast, with parameters in float32; in float16 the loss is scaled.
    """

    TF32 = "tf32"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def is_half(self) -> bool:
        return self in (Precision.BFLOAT16, Precision.FLOAT16)


PRECISIONS = {  # by type of device
    "cuda": tuple(Precision),
    "cpu": tuple(precision for precision in Precision if precision is not Precision.TF32),
}


def require_supported(name: str, asked: Sequence[str], supported: Sequence[str], device: str) -> None:
    """Raise ``InvalidInputError`` if the device does not support a variant or precision.

    name: of what is asked for.
    """
    for value in asked:
        if value not in supported:
            raise InvalidInputError(f"{name} is {value}; device {device!r} has {', '.join(supported)}")


class How(StrEnum):
    """The way mucudnn is applied to a step.

    ``OPTIMIZE``: the model is tuned beforehand by ``mucudnn.optimize``. ``ENABLE``: all convolutions are tuned during a
    warm-up step under ``mucudnn.tuned``.
    """

    OPTIMIZE = "optimize"
    ENABLE = "enable"


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
