"""The modules that replace torch's convolutions: same arguments, same state dict, same results.

``make_tunable`` turns torch's modules into these.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import new_class
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules import conv
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from mucudnn.core.answers import TunedProblem
from mucudnn.core.errors import InvalidInputError, raise_interruption, say_once
from mucudnn.core.problem import ITEM_BYTES, Operation
from mucudnn.kernels.torch_convolution import functions
from mucudnn.running import operators, tape
from mucudnn.running.choices import Choices
from mucudnn.running.eager.hot_path import is_eager
from mucudnn.running.groups import group_of, note_reader, note_source
from mucudnn.running.pending import Pending
from mucudnn.running.problems import transposed_shape

_TORCHS: Any = Tensor.__torch_function__
_USUAL_FUNCTIONS = _TORCHS.__func__, torch._C._disabled_torch_function_impl
_FORWARD = Operation.FORWARD  # looked up in every call
_DTYPES = frozenset(getattr(torch, name) for name in ITEM_BYTES)

# What torch's modules call, unless users have replaced it as seamless textures, counters, quantizers and tracers do.
_CONV1D, _CONV2D, _CONV3D = functions.conv1d, functions.conv2d, functions.conv3d
_CONV_TRANSPOSE1D, _CONV_TRANSPOSE2D = functions.conv_transpose1d, functions.conv_transpose2d
_CONV_TRANSPOSE3D = functions.conv_transpose3d
_CALLED = {
    nn.Conv2d: ("_conv_forward", "conv2d"),
    nn.Conv1d: ("_conv_forward", "conv1d"),
    nn.Conv3d: ("_conv_forward", "conv3d"),
    nn.ConvTranspose2d: ("forward", "conv_transpose2d"),
    nn.ConvTranspose1d: ("forward", "conv_transpose1d"),
    nn.ConvTranspose3d: ("forward", "conv_transpose3d"),
}
_METHODS = {
    method
    for method in (getattr(torchs, name) for torchs, (name, _) in _CALLED.items())
    if getattr(method, "__globals__", None) is vars(conv)
}


class TunedModule:
    """A convolution module that runs its tuned choices.

    These attributes are set in ``vars(module)``, since the user's class may refuse or convert what is set.

    tuned: the choice for each operation, as reported.
    choices: the choices to run; None to run torch's convolution for every input.
    computes_moments: whether the choices compute the moments of y, since a norm reads it.
    normalizes: the operations that normalize x as they read x, since x is the result of a norm.
    confirmation: the comparison of whole steps of the model with torch's, or None.
    unconfirmed: the reason why there was no comparison.
    """

    _untuned_class: Any
    tuned: tuple[TunedProblem, ...] = ()
    choices: Choices | None = None
    computes_moments: bool = False
    normalizes: frozenset[Operation] = frozenset()
    confirmation: object | None = None
    unconfirmed: str | None = None

    @property
    def untuned_class(self) -> type:
        """The module's class before ``optimize``: assigned to ``__class__``, it makes the module torch's own again.

        If other code has since derived a new class from ours for the module, this is that class itself.
        """
        untuned_class: type = vars(type(self)).get("_untuned_class", type(self))
        return untuned_class

    def __prepare_scriptable__(self) -> NoReturn:
        """Reject ``torch.jit.script``, which calls this method and cannot compile a tuned module."""
        name = next(base.__name__ for base in type(self).__mro__ if base.__module__.startswith("mucudnn."))
        raise InvalidInputError(
            f"torch.jit.script cannot compile mucudnn.{name}: use torch.compile, torch.export or torch.jit.trace, or "
            "first make each such module PyTorch's own again with module.__class__ = module.untuned_class"
        )


@contextmanager
def running_torchs_own(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Make the modules run torch's convolution inside the block."""
    before = [(module, module.choices) for module in modules]
    try:
        for module, _ in before:
            vars(module)["choices"] = None
        yield
    finally:
        for module, choices in before:
            vars(module)["choices"] = choices


@contextmanager
def running_without_norms(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Make the modules compute nothing of norms inside the block."""
    before = [(module, module.choices) for module in modules if module.computes_moments or module.normalizes]
    try:
        for module, choices in before:
            vars(module)["choices"] = choices and choices.fusing(computes_moments=False, normalizes=())
        yield
    finally:
        for module, choices in before:
            vars(module)["choices"] = choices


def operator_takes(x: Tensor, weight: Tensor, dims: tuple[int, int]) -> bool:
    """Return whether our operators accept x: a dense, real tensor whose number of dimensions is one of ``dims``.

    Returns False for tensors that wrap others, such as DTensor, of which PyTorch knows what its own operators compute.
    Returns False under forward-mode AD and ``torch.func``, which the operators do not support, also while
    ``torch.compile`` traces them, if x is not a tensor, for example a ``torch.fx.Proxy``, if the weight handles torch's
    functions itself, and under ``torch.export``, whose graphs are for programs without mucudnn. The operator checks
    weight and bias otherwise.
    """
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() not in dims:
        return False
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    if hasattr(type(x), "__tensor_flatten__") or hasattr(type(weight), "__tensor_flatten__"):
        return False
    is_exporting = torch.compiler._is_exporting_flag  # the function of this name is always true to torch 2.9's compiler
    if is_exporting or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        return True
    function: Any = type(weight).__torch_function__
    return getattr(function, "__func__", function) in _USUAL_FUNCTIONS


def padded(module: _ConvNd, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    """Pad x if the module's padding is not symmetric zeros; return x and the remaining padding of the convolution."""
    none = (0,) * (weight.dim() - 2)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, module.padding_mode), none
    if module.padding == "valid":
        return x, none
    if module.padding != "same":
        return x, module.padding
    totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):  # an even filter: the odd row and column belong to the bottom and right
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, tuple(total // 2 for total in totals)


def may_be_tuned(choices: Choices, x_shape: Sequence[int]) -> bool:
    """Return whether to call our operator, given the tuned sizes; always True in compiled graphs.

    In a compiled graph, sizes are known only when the operator runs.

    x_shape: shape of x in the problem.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        return x_shape in choices.x_shapes
    except TypeError:  # symbolic sizes cannot be hashed
        return True


def are_steps(dims: int, *steps: Any) -> bool:
    """Return whether all are tuples of ``dims`` numbers, as in torch's modules unless users assign other types."""
    return all(type(sizes) is tuple and len(sizes) == dims for sizes in steps)


class TunedConvolution(TunedModule, _ConvNd):
    """A module of torch that computes its convolution as tuned, on images or volumes."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        are_torchs = F.conv2d is _CONV2D and F.conv1d is _CONV1D and F.conv3d is _CONV3D
        are_torchs = are_torchs and self._untuned_class._conv_forward in _METHODS
        if isinstance(input, Pending):
            y = self._pending_forward(input, weight, bias) if are_torchs else None
            if y is not None:
                return y
            input = input.computed(by_convolution=True)
        if self.choices is not None or group_of(input) is not None:
            if are_torchs:
                y = self._tuned_forward(input, weight, bias)
                if y is not None:
                    note_source(y, self)
                    note_reader(input, self)
                    return y
            else:
                _say_replaced(self._untuned_class)
        torchs: Tensor = super()._conv_forward(input, weight, bias)
        return torchs

    def _pending_forward(self, input: Pending, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return y by a choice that normalizes and activates what it reads; None if the norm is to be computed before.

        The time of a norm counts as that of no convolution, so that it is computed before while an observer looks on.
        """
        choices, x = self.choices, input.latest()
        if choices is None or _FORWARD not in choices.normalizes or operators.observer is not None:
            return None
        group, dims = x.group if isinstance(x, Pending) else None, len(self.kernel_size)
        is_usual = self.padding_mode == "zeros" and type(self.padding) is tuple
        if group is None or not is_usual or not are_steps(dims, self.stride, self.padding, self.dilation):
            return None
        if not is_eager(group.normalized.x, weight, bias):
            return None
        geometry = self.stride, self.padding, self.dilation, self.groups
        return operators.convolve_group(x, weight, bias, (*geometry, choices), group)

    def _tuned_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return y by the tuned choice; None if torch's convolution is to run.

        Torch's convolution also handles unusual inputs and reports errors.
        """
        is_plain = not torch.compiler.is_compiling() and is_eager(x, weight, bias)
        dims = len(self.kernel_size)
        if not is_plain and not operator_takes(x, weight, (dims + 1, dims + 2)):
            return None
        if x.dim() == dims + 1:
            y = self._tuned_forward(x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        if self.padding_mode == "zeros" and type(self.padding) is tuple:
            padding: Any = self.padding
        else:
            x, padding = padded(self, x, weight)
        if not are_steps(dims, self.stride, padding, self.dilation):
            return None
        choices = self.choices
        geometry = self.stride, padding, self.dilation, self.groups
        if choices is None:
            on_group = is_plain and group_of(x) is not None
            settings = *geometry, None
            if on_group and tape.recording() is None:
                return operators.convolve_plain(_FORWARD, x, weight, bias, settings)
            return None
        if not (x.shape in choices.x_shapes if is_plain else may_be_tuned(choices, x.shape)):  # plain: without a call
            return None
        if is_plain:
            with tape.unseen():
                y = operators.convolve_plain(_FORWARD, x, weight, bias, (*geometry, choices))
            tape.note(y, "convolution", operators.values, _FORWARD, x, weight, bias, (*geometry, choices))
            return y
        return operators.conv2d(x, weight, bias, *geometry, choices.handle)


class Conv2d(TunedConvolution, torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` has the choices with reasons. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv2d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 32, 48)).shape  # (N, C, H, W) -> (N, K, P, Q)
    torch.Size([4, 8, 16, 24])
    """

    _untuned_class = torch.nn.Conv2d


class Conv3d(TunedConvolution, torch.nn.Conv3d):
    """A ``torch.nn.Conv3d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution. ``tuned``
    has the choices with reasons. x: (N, C, D, H, W) or (C, D, H, W), y: (N, K, O, P, Q) or (K, O, P, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv3d(in_channels=3, out_channels=8, kernel_size=3, stride=(1, 2, 2), padding=1)
    >>> layer(torch.zeros(2, 3, 5, 32, 48)).shape  # (N, C, D, H, W) -> (N, K, O, P, Q)
    torch.Size([2, 8, 5, 16, 24])
    """

    _untuned_class = torch.nn.Conv3d


class Conv1d(TunedConvolution, torch.nn.Conv1d):
    """A ``torch.nn.Conv1d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution. ``tuned``
    has the choices with reasons; they treat x as images of height 1. x: (N, C, L) or (C, L), y: (N, K, Q) or (K, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv1d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 48)).shape  # (N, C, L) -> (N, K, Q)
    torch.Size([4, 8, 24])
    """

    _untuned_class = torch.nn.Conv1d

    def _tuned_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute y with the tuned choice. Returns None if torch's convolution is to run, which also reports errors."""
        if self.choices is None or not operator_takes(x, weight, (2, 3)) or weight.dim() != 3:
            return None
        if x.dim() == 2:
            y = self._tuned_forward(x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        x, padding = padded(self, x, weight)
        if not are_steps(1, self.stride, padding, self.dilation):
            return None
        images = x.contiguous().unsqueeze(2)  # as torch does
        if not may_be_tuned(self.choices, images.shape):
            return None
        geometry = (1, self.stride[0]), (0, padding[0]), (1, self.dilation[0]), self.groups
        return operators.convolve(_FORWARD, images, weight.unsqueeze(2), bias, *geometry, self.choices).squeeze(2)


class TunedTransposed(TunedModule, _ConvTransposeNd):
    """A module of torch that computes its transposed convolution as tuned, on sequences, images or volumes."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.choices is not None:
            are_torchs = F.conv_transpose2d is _CONV_TRANSPOSE2D and F.conv_transpose1d is _CONV_TRANSPOSE1D
            if are_torchs and F.conv_transpose3d is _CONV_TRANSPOSE3D and self._untuned_class.forward in _METHODS:
                y = self._tuned_forward(input, output_size)
                if y is not None:
                    return y
            else:
                _say_replaced(self._untuned_class)
        torchs: Tensor = super().forward(input, output_size)
        return torchs

    def _tuned_forward(self, x: Tensor, output_size: list[int] | None) -> Tensor | None:
        """Compute y with the tuned choice. Returns None if torch's convolution is to run, which also reports errors."""
        assert self.choices is not None
        dims, weight = len(self.kernel_size), self.weight
        if not operator_takes(x, weight, (dims + 1, dims + 2)) or self.padding_mode != "zeros":
            return None
        steps: Any = self.stride, self.padding, self.dilation
        if not are_steps(dims, *steps) or weight.dim() != dims + 2 or x.shape[-dims - 1] != weight.shape[0]:
            return None
        stride, padding, dilation = steps
        output_padding = self._output_padding(x, output_size, stride, padding, self.kernel_size, dims, dilation)  # type: ignore[arg-type]
        images = x if x.dim() == dims + 2 else x.unsqueeze(0)
        if dims == 1:  # images of height 1, contiguous as torch makes them
            images, weight = images.contiguous().unsqueeze(2), weight.unsqueeze(2)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
            output_padding = [0, *output_padding]
        shape = transposed_shape(images.shape, weight.shape, (stride, padding, dilation, self.groups), output_padding)
        if not may_be_tuned(self.choices, shape):
            return None
        is_inference = not torch.is_grad_enabled() and is_eager(images, weight, self.bias)
        compute = operators.transposed_values if is_inference else operators.conv_transpose2d
        y: Tensor = compute(
            images, weight, self.bias, stride, padding, output_padding, dilation, self.groups, self.choices.handle
        )
        y = y.squeeze(2) if dims == 1 else y
        return y if x.dim() == dims + 2 else y.squeeze(0)


class ConvTranspose2d(TunedTransposed, torch.nn.ConvTranspose2d):
    """A ``torch.nn.ConvTranspose2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` has the choices with reasons, named by the convolution that the module transposes: y is the backward data
    of that convolution, dx its forward operation. x: (N, C, P, Q) or (C, P, Q), y: (N, K, H, W) or (K, H, W).

    >>> import torch, mucudnn
    >>> layer = mucudnn.ConvTranspose2d(in_channels=8, out_channels=3, kernel_size=4, stride=2, padding=1)
    >>> layer(torch.zeros(4, 8, 16, 24)).shape  # (N, C, P, Q) -> (N, K, H, W)
    torch.Size([4, 3, 32, 48])
    """

    _untuned_class = torch.nn.ConvTranspose2d


class ConvTranspose1d(TunedTransposed, torch.nn.ConvTranspose1d):
    """A ``torch.nn.ConvTranspose1d``: same arguments, same state dict, same result.

    As ``ConvTranspose2d``, on images of height 1. x: (N, C, Q) or (C, Q), y: (N, K, W) or (K, W).

    >>> import torch, mucudnn
    >>> layer = mucudnn.ConvTranspose1d(in_channels=8, out_channels=3, kernel_size=4, stride=2, padding=1)
    >>> layer(torch.zeros(4, 8, 24)).shape  # (N, C, Q) -> (N, K, W)
    torch.Size([4, 3, 48])
    """

    _untuned_class = torch.nn.ConvTranspose1d


class ConvTranspose3d(TunedTransposed, torch.nn.ConvTranspose3d):
    """A ``torch.nn.ConvTranspose3d``: same arguments, same state dict, same result.

    As ``ConvTranspose2d``, on volumes. x: (N, C, O, P, Q) or (C, O, P, Q), y: (N, K, D, H, W) or (K, D, H, W).

    >>> import torch, mucudnn
    >>> layer = mucudnn.ConvTranspose3d(in_channels=8, out_channels=3, kernel_size=2, stride=2)
    >>> layer(torch.zeros(1, 8, 4, 16, 24)).shape  # (N, C, O, P, Q) -> (N, K, D, H, W)
    torch.Size([1, 3, 8, 32, 48])
    """

    _untuned_class = torch.nn.ConvTranspose3d


# Classes of tuned modules. Each of torch's convolution classes has a fixed counterpart. For a subclass that inherits
# the methods that ours override, a class is derived from ours and that subclass, so that a tuned module stays an
# instance of its class. Pickles name the two base classes, and unpickling derives the class again.

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: Conv2d,
    nn.Conv1d: Conv1d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
_Class = type[nn.Module]
_derived_classes: dict[tuple[_Class, _Class], _Class] = {}  # by our class and the user's
_ATTRIBUTES = *TunedModule.__annotations__, "untuned_class"
_NOT_COPIED = ("__dict__", "__weakref__")  # class attributes that Python makes itself


def make_tunable(module: nn.Module) -> None:
    """Turn a module of torch into one of mucudnn in place.

    Raises ``InvalidInputError`` if ``why_left_alone`` has a reason.
    """
    object.__setattr__(module, "__class__", _tuned_class(module))


def why_left_alone(module: nn.Module) -> str | None:
    """Return the reason why a module cannot be turned into one of mucudnn; None if it can or already is one."""
    return why_fixed(module, _tuned_class)


def why_fixed(module: nn.Module, class_of: Callable[[nn.Module], _Class]) -> str | None:
    """Return the reason why the class of a module cannot become that of ``class_of``, which may raise it; or None."""
    try:
        tuned_class = class_of(module)
        dummy = object.__new__(type(module))  # without state, to test whether the class can be changed
        object.__setattr__(dummy, "__class__", tuned_class)
    except InvalidInputError as error:
        return str(error)
    except Exception as error:  # the class may raise anything when it is asked for attributes
        raise_interruption(error)
        return f"{type(module).__name__} cannot be changed: {error}"
    return None


def torchs_class(cls: type) -> _Class | None:
    """Return the tunable torch convolution class from which a class derives; None if there is none."""
    return next((torchs for torchs in OURS if issubclass(cls, torchs)), None)


def replaced(cls: type) -> str | None:
    """Return the name of what torch's convolution of this class calls and users have replaced; None if nothing is."""
    torchs = cast(_Class, torchs_class(cls))
    method, function = _CALLED[torchs]
    if getattr(F, function) is not getattr(functions, function):
        return f"torch.nn.functional.{function}"
    return None if getattr(cls, method) in _METHODS else f"{cls.__name__}.{method}"


def _say_replaced(cls: type) -> None:
    if not torch.compiler.is_compiling():
        say_once(f"{replaced(cls) or 'torch.nn.functional'} has been replaced: it runs in place of tuned convolutions")


def _tuned_class(module: nn.Module) -> _Class:
    """Return the class for a tuned version of the module. Raises ``InvalidInputError`` if there cannot be one."""
    cls = type(module)
    if issubclass(cls, TunedModule):
        return cls
    if (torchs := torchs_class(cls)) and (name := _CALLED[torchs][0]) in vars(module):
        raise InvalidInputError(f"it has a {name} of its own")
    require_free_names(module)
    if is_parametrized(module):
        return _parametrized(module)
    return _of_class(cls)


def require_free_names(module: nn.Module) -> None:
    """Raise ``InvalidInputError`` if a module has an attribute of its own where tuned modules have theirs."""
    taken = next((name for name in _ATTRIBUTES if hasattr(module, name)), None)
    if taken is not None:
        raise InvalidInputError(f"{type(module).__name__} has an attribute '{taken}' of its own, as tuned modules have")


def _parametrized(module: nn.Module) -> _Class:
    """Return the class that torch would have made if the module had been tuned before it was parametrized.

    Torch makes a class for each parametrized module, with the parameters as properties, and deletes these properties
    from that class when the parametrization is removed. That fails for a subclass of the class.
    """
    cls, parametrized = type(module), cast(nn.ModuleDict, module.parametrizations)
    before, *mixed_in = cls.__bases__
    if mixed_in or not all(name in vars(cls) for name in parametrized):
        raise InvalidInputError(f"its parameters are parametrized, and {cls.__name__} is not the class that torch made")
    copied = {name: value for name, value in vars(cls).items() if name not in _NOT_COPIED}
    return type(cls.__name__, (_of_class(before),), {**copied, "_untuned_class": cls})


def _of_class(cls: _Class) -> _Class:
    torchs = torchs_class(cls)
    if torchs is None:
        raise InvalidInputError(f"{cls.__name__} is not among {', '.join(kind.__name__ for kind in OURS)}")
    for name in ("forward", "_output_padding") if issubclass(torchs, _ConvTransposeNd) else ("_conv_forward",):
        if getattr(cls, name) is not getattr(torchs, name):
            raise InvalidInputError(f"{cls.__name__} has a {name} of its own")
    if (replacement := replaced(torchs)) is not None:
        raise InvalidInputError(f"{replacement} has been replaced")
    return OURS[torchs] if cls is torchs else derived_tuned(OURS[torchs], cls)


def _construct_tuned(tuned_class: _Class, users_class: _Class, arguments: tuple[Any, ...]) -> nn.Module:
    """Call a derived class, which pickles cannot name."""
    return derived_tuned(tuned_class, users_class)(*arguments)


def derived_tuned(tuned_class: _Class, users_class: _Class) -> _Class:
    """Return the class derived from mucudnn's and the user's class, which is made once.

    Raises ``InvalidInputError`` if the user's class cannot be derived from.
    """
    if (tuned_class, users_class) in _derived_classes:
        return _derived_classes[tuned_class, users_class]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(max(protocol, 2))
        if type(self) is cls and reduced[0] is cls:  # the user's class has its own pickling, by its constructor
            return _construct_tuned, (tuned_class, users_class, reduced[1]), *reduced[2:]
        if type(self) is not cls or reduced[:2] != (copyreg.__newobj__, (cls,)):  # type: ignore[attr-defined]
            return reduced
        return new_tuned, (tuned_class, users_class), *reduced[2:]

    names: dict[str, Any] = {
        "__doc__": f"A tuned ``{users_class.__name__}``: see ``mucudnn.{tuned_class.__name__}``.",
        "__qualname__": f"Tuned{users_class.__qualname__}",
        "__reduce_ex__": reduce,
        "_untuned_class": users_class,
    }
    cls = _derived_classes[tuned_class, users_class] = derived(
        f"Tuned{users_class.__name__}", tuned_class, users_class, names
    )
    return cls


def derived(name: str, base: _Class, users_class: _Class, attributes: Mapping[str, Any]) -> _Class:
    """Return a new class derived from one of mucudnn's and the user's, in the user's module.

    Raises ``InvalidInputError`` if no class can derive from the user's.
    """
    attributes = {"__module__": users_class.__module__, **attributes}
    try:
        cls = new_class(name, (base, users_class), exec_body=lambda namespace: namespace.update(attributes))
    except Exception as error:  # metaclasses and __init_subclass__ may raise anything
        raise_interruption(error)
        raise InvalidInputError(f"no class can derive from {users_class.__name__}: {error}") from error
    return cast(_Class, cls)


def new_tuned(tuned_class: _Class, users_class: _Class) -> nn.Module:
    """Return a tuned module without state, for copying and unpickling; pickles refer to this function."""
    cls = derived_tuned(tuned_class, users_class)
    return cls.__new__(cls)
