"""Steps of a model on a sample input, as a user would run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class OwnStep:
    """A step of a model on one sample input: forward and backward pass in training mode, else the forward pass.

    arguments: the model's only argument, or a tuple of all positional ones. Each differentiable output gets a random
    gradient, drawn once: a gradient of ones would vanish behind a normalization, and zeros may change the time. Without
    differentiable outputs, the step is the forward pass. Gradients are None at the start, and are kept after the step.

    Raises any error of the model.
    """

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        self._gradients: dict[int, Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        arguments = tree_map(leaf, self.arguments)
        if not is_training(model):
            with torch.no_grad():
                model(*arguments)
            return
        set_gradients((parameter, None) for parameter in model.parameters())
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            torch.clear_autocast_cache()
        output = model(*arguments)
        trained = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        if trained:
            torch.autograd.backward(trained, [self._gradient(number, y) for number, y in enumerate(trained)])

    def _gradient(self, number: int, y: Tensor) -> Tensor:
        known = self._gradients.get(number)
        if known is None or (known.shape, known.dtype) != (y.shape, y.dtype):
            known = self._gradients[number] = torch.randn_like(y)
        return known


def leaf(value: Any) -> Any:
    """Return a leaf tensor with the values of an input, so that its gradient is not added to the caller's tensor."""
    if not isinstance(value, Tensor):
        return value
    trainable = value.clone() if value.is_inference() else value.detach()
    return trainable.requires_grad_(value.requires_grad)


def is_training(module: nn.Module) -> bool:
    """Return whether a module is in training mode; what ``torch.jit.freeze`` makes has no mode, and is not."""
    return bool(getattr(module, "training", False))


def set_gradients(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Assign gradients where they differ: a module may refuse assignments."""
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient
