"""``BandedModel``, a model that runs in bands of rows within a memory budget."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mucudnn.core.errors import InvalidInputError, first_line, raise_interruption, warn
from mucudnn.graph.guards import Guards, has_kept, memories_of_results
from mucudnn.graph.schedule import Schedule
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.running.modules import derived
from mucudnn.tuning.model_state import undisturbed

Signature = tuple[object, ...]
_MISSING = object()
_is_compiling = torch.compiler.is_compiling


class BandedModel(nn.Module):
    """A model in ``eval()`` that runs as a graph; with a memory budget, each call stays within its bytes.

    The bytes are beside parameters, arguments and results. It is an instance of the model's class and shares all
    attributes with the model, which is ``untuned_model``. It computes what the model computes, for inputs of the shapes
    and dtypes that it was tuned for. The model's own code runs for others, where gradients are recorded, in modes that
    change what PyTorch's operators do, and while the model is not as it was when it was tuned (``Guards``); a warning
    says why, once for each reason. Exported programs have the model's own operators.
    """

    tuned_graphs: ClassVar[Graphs]  # the class is made for this model

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Make an instance of the model's class, as slices of ``nn.Sequential`` are, which runs as no graph."""
        self.__class__ = type(self.tuned_graphs.model)  # type: ignore[assignment]
        self.__init__(*arguments, **named)  # type: ignore[misc]

    @property
    def untuned_model(self) -> nn.Module:
        """The model that was given to ``optimize``."""
        return self.tuned_graphs.model

    def train(self, mode: bool = True) -> Self:
        """Switch to ``eval()`` mode; raise ``InvalidInputError`` otherwise."""
        if mode:
            raise InvalidInputError(
                "a model that runs as a graph is for inference only: train the model that was given to "
                "mucudnn.optimize, which is the attribute 'untuned_model'"
            )
        return super().train(mode)

    _compiled_call_impl = property(lambda self: None)  # not even once the model is compiled in place

    def compile(self, *arguments: Any, **named: Any) -> None:
        """Do nothing, since a graph is not compiled."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what ``torch.jit.script`` compiles: the model."""
        return self.untuned_model

    def extra_repr(self) -> str:
        return "\n".join(filter(None, (super().extra_repr(), *map(str, self.tuned_graphs.findings))))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return banded, (self.tuned_graphs,)

    def __copy__(self) -> BandedModel:
        return banded(Graphs(**self.tuned_graphs.__getstate__() | {"model": copy.copy(self.untuned_model)}))

    def __deepcopy__(self, memo: dict[int, Any]) -> BandedModel:
        return banded(copy.deepcopy(self.tuned_graphs, memo))


class Graphs:
    """The graphs of a model, and what they have read of it.

    schedules: by signature of the arguments; None where the model itself is faster and within the bytes.
    findings: what was chosen and why, for ``report``.
    batch_invariant: whether batches run as several calls of the sizes that there are graphs for.
    are_valid: whether the model is as the graphs have read it.
    """

    def __init__(
        self,
        model: nn.Module,
        schedules: Mapping[Signature, Schedule | None],
        findings: Sequence[Any] = (),
        *,
        batch_invariant: bool = False,
        are_valid: bool = True,
    ) -> None:
        self.model, self.schedules, self.findings = model, dict(schedules), tuple(findings)
        self.batch_invariant = batch_invariant
        kept = [entry for schedule in self.schedules.values() if schedule for entry in schedule.captured.kept]
        self._guards = Guards(model, kept) if are_valid else None
        self._kept_for: Signature | None = None  # of the last call for which the model had to make what it keeps
        self._said: set[str] = set()
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        self._defaults = {parameter.name: parameter.default for parameter in parameters}

    def run(self, model: nn.Module, forward: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> Any:
        """Return the result of a call by the graph for it; by the model's ``forward`` if there is none."""
        positional = self._by_position(arguments, named) if named else arguments
        if self.batch_invariant and (parts := self._parts(positional)):
            return joined([self.run(model, forward, part, {}) for part in parts])
        schedule, why = self._schedule_for(positional) if vars(model) is vars(self.model) else (None, None)
        if schedule is not None:
            return schedule.run(positional)
        if why is not None and why not in self._said:
            self._said.add(why)
            warn(f"{type(self.model).__name__} runs as it was, not as a tuned graph: {why}", RuntimeWarning)
        return forward(model, *arguments, **named)

    def _parts(self, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the arguments of several calls, of one sample each or of as many as a graph is for; none for one."""
        n, parts, first = batch_size_of(arguments), list[tuple[Any, ...]](), 0
        if n < 2 or signature_of(arguments) in self.schedules:
            return parts
        sizes = sorted({schedule.captured.samples for schedule in self.schedules.values() if schedule}, reverse=True)
        while first < n:
            for size in (*sizes, 1):
                part = samples_of(arguments, first, first + size)
                if size == 1 or (first + size <= n and signature_of(part) in self.schedules):
                    break
            parts.append(part)
            first += size
        return parts

    def _by_position(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call by position, without defaults; what cannot be given so as a dictionary."""
        values = {name: value for name, value in named.items() if value is not self._defaults.get(name, _MISSING)}
        names = self._names[len(arguments) : len(arguments) + len(values)]
        return (*arguments, *map(values.get, names)) if set(names) == values.keys() else (*arguments, values)

    def _schedule_for(self, arguments: tuple[Any, ...]) -> tuple[Schedule | None, str | None]:
        """Return what runs a call; if the model itself does although it is not faster, the reason."""
        if _is_watched():
            return None, "autocast, a mode or a transform of PyTorch is active, such as torch.func's or a tracer"
        leaves: Sequence[Any] = arguments
        if not all(isinstance(argument, Tensor) for argument in arguments):
            leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        signature = signature_of(arguments)
        if signature not in self.schedules:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            return None, (
                f"it was not tuned for these arguments, of shapes {shapes}; give optimize a sample of each shape"
            )
        schedule = self.schedules[signature]
        if schedule is None:
            return None, None
        if not all(map(is_plain, tensors)):
            return None, "an argument is of a subclass of Tensor, or a view that is negated or conjugated lazily"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in chain(tensors, self.model.parameters())):
            return None, "gradients are recorded; call it in torch.no_grad()"
        if self._guards is None:
            return None, "it was copied after it had changed; optimize it again"
        why = self._guards.check()
        if why is not None:
            return None, f"{why}; {'put it back' if why.endswith('has been replaced') else 'optimize it again'}"
        if schedule.captured.kept and not has_kept(schedule.captured.kept):  # the model makes it now
            is_again, self._kept_for = self._kept_for == signature, signature
            return None, "what it keeps of a call depends on the input" if is_again else None
        strides = tuple([tensor.stride() for tensor in tensors])
        if strides not in schedule.memories:
            try:
                with undisturbed(self.model, with_values=False):  # the model runs on tensors without values
                    schedule.memories[strides] = memories_of_results(self.model, arguments, self._guards.tensors)
            except Exception as error:  # the model may raise anything
                raise_interruption(error)
                return None, f"its results are not known for arguments of these strides: {first_line(error)}"
        return schedule, None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "schedules": self.schedules,
            "findings": self.findings,
            "batch_invariant": self.batch_invariant,
            "are_valid": self._guards is not None and self._guards.check() is None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


_run_uncompiled: Any = torch.compiler.disable(Graphs.run)  # type: ignore[no-untyped-call]


def banded(graphs: Graphs) -> BandedModel:
    """Return a model that runs as graphs. Raises ``InvalidInputError`` if no class can derive from the model's."""
    users, attributes = type(graphs.model), vars(graphs.model)
    # A graph is of a whole call: where that may be more than the class's ``forward``, the graph runs in its place.
    calls = (getattr(call, "__globals__", None) for call in (users.__call__, users._call_impl))
    is_torchs = "forward" not in attributes and all(module is vars(nn.modules.module) for module in calls)
    name = "forward" if is_torchs else "__call__"

    @wraps(getattr(users, name), updated=())
    def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if not _is_compiling():
            return graphs.run(self, getattr(users, name), arguments, named)
        if torch.compiler._is_exporting_flag:  # what is_exporting() tells is always true to torch 2.9's compiler
            return getattr(users, name)(self, *arguments, **named)
        return _run_uncompiled(graphs, self, getattr(users, name), arguments, named)

    names = {"tuned_graphs": graphs, name: call, "__doc__": users.__doc__, "__qualname__": users.__qualname__}
    model = object.__new__(derived(users.__name__, BandedModel, users, names))
    object.__setattr__(model, "__dict__", attributes)
    return cast(BandedModel, model)


def _is_watched() -> bool:
    """Return whether something changes what PyTorch's operators do; a default device does not."""
    if (
        torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return True
    if not torch._C._len_torch_function_stack():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


def batch_size_of(arguments: tuple[Any, ...]) -> int:
    """Return the number of samples that all tensors among the arguments have; 0 if they differ."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    return sizes.pop() if len(sizes) == 1 else 0


def samples_of(arguments: tuple[Any, ...], first: int, stop: int) -> tuple[Any, ...]:
    """Return the arguments with the samples from ``first`` to ``stop`` - 1 of their tensors."""
    return cast(
        tuple[Any, ...], tree_map(lambda leaf: leaf[first:stop] if isinstance(leaf, Tensor) else leaf, arguments)
    )


def joined(results: Sequence[Any]) -> Any:
    """Return the result of a batch, given those of its parts in order."""
    leaves, specs = zip(*map(tree_flatten, results), strict=True)
    parts = zip(*leaves, strict=True)
    return tree_unflatten([torch.cat(part) if isinstance(part[0], Tensor) else part[0] for part in parts], specs[0])


def signature_of(arguments: tuple[Any, ...]) -> Signature:
    """Return what the arguments of two calls must have in common to be run by the same schedule."""
    if all(isinstance(argument, Tensor) for argument in arguments):
        return tuple(map(_leaf_signature, arguments))
    leaves, spec = tree_flatten(arguments)
    return (str(spec), *map(_leaf_signature, leaves))


def _leaf_signature(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.layout
    return type(leaf), repr(leaf)
