"""Which recipe runs a call: found by all that decides, made when it is first needed, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.running.devices import made_current
from mucudnn.running.execution import Recipe
from mucudnn.words.errors import CapturingError, InvalidInputError, UnavailableError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.words.torch_settings import settings_that_bar

_Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups

_DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}
_MEMORY_FORMATS = {torch_format: ours for ours, torch_format in TORCH_FORMATS.items()}
_RECIPES_KEPT = 4096  # by one ``Choices``; shapes that never come back must not pile up


class RecipeSource(Protocol):
    """Where recipes come from: ``recipes`` has those that were asked for."""

    device_type: str
    recipes: dict[tuple[Any, ...], Recipe | None]

    def recipe(self, problem: ConvProblem, n: int) -> Recipe | None:
        """What runs ``problem`` on ``n`` samples; ``None``: torch's own. Raises ``MucudnnError``s where it cannot."""


def recipe_of(
    choices: RecipeSource,
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Recipe | None:
    """``None``: torch's own. third: bias or dy. Kept by all that decides, in plain numbers: every call comes here.

    Raises ``CapturingError`` where a recipe would have to be made while a CUDA graph is captured; ``StepError`` where
    there is no memory to make it with.
    """
    geometry = ((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), groups)
    layout = (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
    key = (operation, layout, None if third is None else (third.shape, third.dtype, third.device), geometry)
    settings = settings_that_bar() if x.is_cuda else torch.get_num_threads()
    try:
        return choices.recipes[key, settings]
    except KeyError:
        recipe = _resolve(choices, operation, x, w, third, geometry)
    if len(choices.recipes) >= _RECIPES_KEPT:
        choices.recipes.clear()
    choices.recipes[key, settings] = recipe
    return recipe


def forget(choices: RecipeSource, recipe: Recipe | None) -> None:
    """The recipe is made anew when it is next asked for."""
    for key, kept in list(choices.recipes.items()):
        if kept is recipe:
            choices.recipes.pop(key, None)


def _resolve(
    choices: RecipeSource, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: _Geometry
) -> Recipe | None:
    """``None`` too for what is no convolution (torch says what is wrong) and for algorithms this machine lacks."""
    tensors = [tensor for tensor in (x, w, third) if tensor is not None]
    alike = {(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors} == {(x.dtype, x.device, torch.strided)}
    if not alike or x.dtype not in _DTYPE_NAMES or x.device.type != choices.device_type:
        return None
    if x.dim() != 4 or w.dim() != 4 or len(x) == 0 or geometry[-1] < 1:
        return None
    try:
        problem = _problem(operation, x, w, geometry)
        expected = (problem.k,) if operation is Operation.FORWARD else problem.y_shape(len(x))
        if x.shape != problem.x_shape(len(x)) or w.shape != problem.w_shape():
            return None
        if third is not None and third.shape != expected:
            return None
        with made_current(x.device):
            return choices.recipe(problem, len(x))
    except CapturingError:
        raise  # it is nothing to remember
    except (InvalidInputError, UnavailableError):
        return None


def _problem(operation: Operation, x: Tensor, w: Tensor, geometry: _Geometry) -> ConvProblem:
    _, c, height, width = x.shape
    k, _, r, s = w.shape
    memory_format = _torchs_memory_format(x, w, geometry)
    return ConvProblem(operation, c, height, width, k, r, s, *geometry, _DTYPE_NAMES[x.dtype], memory_format)


def _torchs_memory_format(x: Tensor, w: Tensor, geometry: _Geometry) -> MemoryFormat:
    """The memory format in which torch would compute and answer; ours must not differ."""
    stride, padding, dilation, groups = geometry
    backend = torch._C._select_conv_backend(x, w, None, stride, padding, dilation, False, (0, 0), groups, None)
    return _MEMORY_FORMATS[torch._C._conv_determine_backend_memory_format(x, w, backend)]
