"""Random training of random networks, by PyTorch alone and with groups, and what differs beyond rounding.

Three runs take the same steps: PyTorch's own, the one with groups, and a float64 copy of PyTorch's. Each step begins at
the parameters and statistics that PyTorch's run had, so that differences do not grow from step to step. The run with
groups must be as near to float64 as PyTorch's; where it is not, PyTorch's runs from inputs that differ in the last bit
show how much rounding may do, and other numbers for the same network and steps show whether it was chance, such as a
value beside the kink of a ReLU: what is wrong is so for all numbers.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from support.random_blocks import OwnNorm, Written, initialize, network, random_channels, random_kinds, wide
from support.step_records import LOG, Record
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mucudnn.running.modules import make_tunable, why_left_alone
from mucudnn.running.norms import make_groups
from mucudnn.running.pending import ChangedError

WithGroups = Callable[[nn.Module, Callable[[nn.Module], object]], bool]  # of a model, and of what runs it
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, OwnNorm)

# What may happen to a model before a step, and the ways to take one.
EVENTS = ["eval", "inference", "eval with gradients", "copy", "pickle", "load", "freeze", "thaw", "eps", "momentum"]
EVENTS += ["new weight", "float64 and back", "sync", "other format", "reset", "fix weights", "no hooks"]
WAYS = ["plain"] * 12 + ["accumulate"] * 3 + ["retain"] * 2 + ["second order", "grad", "functional", "no_grad"]
WAYS += ["saved tensors", "keep gradients", "twice", "pieces", "two forwards", "two forwards", "evaluate between"]
WAYS += ["function mode", "dispatch mode", "thread", "forward mode", "func"]

FACTORS = {torch.float64: 32.0, torch.float32: 16.0, torch.float16: 6.0, torch.bfloat16: 6.0}


@dataclass(frozen=True)
class Hook:
    """A hook on a module, which records what it sees; of some kinds, it changes that as well.

    target: which of the model's modules, as a share of their number.
    """

    kind: str
    target: float
    number: int

    def register(self, model: nn.Module) -> Any:
        modules = [module for _, module in model.named_modules()]
        module = modules[int(self.target * len(modules))]
        if self.kind in ("forward", "replace", "double"):
            return module.register_forward_hook(self)
        if self.kind == "pre":
            return module.register_forward_pre_hook(self)
        if self.kind == "backward pre":
            return module.register_full_backward_pre_hook(self)
        return module.register_full_backward_hook(self)

    def __call__(self, module: nn.Module, *tensors: Any) -> Any:
        order = "backward hooks" if "backward" in self.kind else "forward hooks"
        LOG.event(order, f"{self.kind} {self.number}", tensors)
        if self.kind == "replace" and isinstance(tensors[-1], Tensor):
            return tensors[-1].clone()
        if self.kind == "double" and isinstance(tensors[-1], Tensor):
            return tensors[-1] * 2
        return None


@dataclass(frozen=True)
class Step:
    """How a step is taken: what happens before it, its way, and the batch sizes, one for each backward pass."""

    way: str
    events: tuple[str, ...]
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """A random network and how it is trained.

    checkpoints: for each block whether its checkpoint is reentrant, or None.
    mixed: norms stay in float32.
    fixed: the parameters that need no gradient: "some", "norms", "all" or "".
    groups_last: groups are turned on after hooks and fixed parameters.
    tunes: convolutions are ours, which may have groups compute their input again.
    offset: the mean of the input, of deviation 1; NaN for a NaN among its numbers.
    """

    kinds: tuple[tuple[str, int], ...]
    channels: int
    extent: tuple[int, ...]
    end: str
    checkpoints: tuple[bool | None, ...]
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    mixed: bool = False
    x_format: str = "contiguous"
    model_format: str = "contiguous"
    needs_dx: bool = True
    fixed: str = ""
    hooks: tuple[Hook, ...] = ()
    groups_last: bool = False
    threads: int = 1
    offset: float = 0.0
    tunes: bool = False
    steps: tuple[Step, ...] = (Step("plain", (), (2,)),)

    def __str__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if name not in ("kinds", "steps")]
        return "\n".join((f"{model_of(self, 0)}", "", ", ".join(settings), *map(str, self.steps)))


def draw(seed: int) -> Draw:
    """Return the network and the training of a seed."""
    random = Random(f"groups {seed}")
    dims = random.choice([1, 2, 2, 2, 2, 2, 2, 3])
    extent = tuple(random.randint(*((2, 12), (2, 9), (2, 4))[dims - 1]) for _ in range(dims))
    dtypes = [torch.float32] * 7 + [torch.bfloat16, torch.float16, torch.float64]
    dtype = random.choice(dtypes)
    if dims == 3 and dtype is torch.bfloat16:  # gradients of PyTorch 2.13 for filters of volumes are garbage
        dtype = torch.float16
    kinds = random_kinds(random)
    checkpoints = random.choice([(None,), (None,), (None,), (None, True), (None, False, False)])
    result = Draw(
        kinds,
        random_channels(random),
        extent,
        random.choice(["features"] * 5 + ["scores", "pair", "dict", "norm"]),
        tuple(random.choice(checkpoints) for _ in kinds),
        dtype,
        autocast=dtype is torch.float32 and dims < 3 and random.random() < 0.1,
        mixed=dtype in (torch.bfloat16, torch.float16) and random.random() < 0.5,
        x_format=random.choice(["contiguous", "contiguous", "channels_last", "channels_last", "slice", "permuted"]),
        model_format=random.choice(["contiguous", "contiguous", "channels_last"]),
        needs_dx=random.random() < 0.7,
        fixed=random.choice([""] * 7 + ["some", "norms", "all"]),
        hooks=tuple(_random_hook(random, number) for number in range(random.choice([0, 0, 0, 0, 1, 2, 4]))),
        groups_last=random.random() < 0.5,
        threads=random.choice([1] * 9 + [2]),
        offset=random.choice([0.0] * 18 + [100.0, math.nan]),
        tunes=random.random() < 0.6,
        steps=tuple(_random_step(random, math.prod(extent)) for _ in range(random.choice([2, 2, 3]))),
    )
    if result.end == "scores":  # norms of one value each raise an error
        steps = tuple(
            replace(step, batch_sizes=tuple(max(2, size) for size in step.batch_sizes)) for step in result.steps
        )
        result = replace(result, steps=steps)
    if any(one is not None for one in result.checkpoints):  # SyncBatchNorm is none of ours, and updates twice
        steps = tuple(
            replace(step, events=tuple(event for event in step.events if event != "sync")) for step in result.steps
        )
        result = replace(result, steps=steps)
    if True in result.checkpoints:  # such checkpoints need an input that needs a gradient, and no autograd.grad
        steps = tuple(_without(step, "second order", "grad") for step in result.steps)
        result = replace(result, needs_dx=True, steps=steps)
    if any(one is not None for one in result.checkpoints):  # recomputation happens after functional_call
        steps = tuple(_without(step, "functional", "forward mode", "func", "function mode") for step in result.steps)
        result = replace(result, steps=steps)
    if dtype in (torch.bfloat16, torch.float16) or result.hooks:  # of which PyTorch knows no forward mode
        result = replace(result, steps=tuple(_without(step, "forward mode", "func") for step in result.steps))
    return result


def _without(step: Step, *ways: str) -> Step:
    return replace(step, way="plain") if step.way in ways else step


def _random_hook(random: Random, number: int) -> Hook:
    kinds = ["forward", "forward", "forward", "replace", "double", "pre", "backward", "backward", "backward pre"]
    return Hook(random.choice(kinds), random.random(), number)


def _random_step(random: Random, pixels: int) -> Step:
    way = random.choice(WAYS)
    events = tuple(random.sample(EVENTS, random.choice([0, 0, 0, 0, 1, 1, 2])))
    smallest = 1 if pixels > 3 else 2
    count = 2 if way in ("accumulate", "two forwards") else 1
    return Step(way, events, tuple(random.randint(smallest, 5) for _ in range(count)))


def model_of(draw: Draw, numbers: int) -> Written:
    model = network(draw.kinds, draw.channels, draw.extent, end=draw.end, checkpoints=draw.checkpoints)
    initialize(model, numbers)
    if draw.model_format == "channels_last" and len(draw.extent) == 2:
        model = model.to(memory_format=torch.channels_last)
    model.to(draw.dtype)
    if draw.mixed:
        for norm in _norms(model):
            norm.float()
    return model


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, NORMS)]


@dataclass(frozen=True)
class Runner:
    """A way to run a draw: PyTorch's own, unless these say otherwise.

    numbers: the seed of parameters and inputs.
    with_groups: turns groups on.
    starts: the state dicts to begin steps with; None to go on with the run's own.
    noise: inputs and parameters differ by about one bit, by this seed; 0: not at all.
    """

    draw: Draw
    numbers: int
    with_groups: WithGroups | None = None
    starts: Sequence[dict[str, Tensor]] | None = None
    is_exact: bool = False
    is_checkpointed: bool = True
    noise: int = 0

    def run(self) -> Record:
        """Take the draw's steps, until an exception ends them."""
        record = Record()
        LOG.begin(record, checkpoints=self.is_checkpointed)
        torch.set_num_threads(self.draw.threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._take_steps(record)
            except Exception as error:
                record.raised = error
        record.facts["warnings"] = sorted({str(warning.message).partition("\n")[0] for warning in caught})
        return record

    def _take_steps(self, record: Record) -> None:
        model = self._prepared()
        hooks: list[Any] = []
        for index, step in enumerate(self.draw.steps):
            if self.starts is not None and index == len(self.starts):
                return  # PyTorch's own run has ended here
            LOG.begin_step(index, sees_backward=step.way != "second order")
            if index == 0:
                hooks = self._with_hooks(model)
            for event in step.events:
                model = self._changed(model, event, step, hooks)
            if self.starts is not None:
                self._load(model, self.starts[index])
            record.starts.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            torch.default_generator.manual_seed(index)  # quicker than that of every device
            self._take(model, step)
            LOG.end_step()
            LOG.fact("state_dict", [*model.state_dict()])
            LOG.fact("modes", [(name, module.training) for name, module in model.named_modules()])
            for name, buffer in model.named_buffers():
                LOG.value(f"buffer {name}", buffer)

    def _prepared(self) -> nn.Module:
        model: nn.Module = model_of(self.draw, self.numbers)
        return model.double() if self.is_exact else model

    def _with_hooks(self, model: nn.Module) -> list[Any]:
        """Set up the model as the draw says; return its hooks."""
        draw = self.draw
        if not draw.groups_last:
            self._turn_on(model)
        hooks = [hook.register(model) for hook in draw.hooks]
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(draw.fixed != "all" and not (draw.fixed == "some" and index % 3 == 0))
        if draw.fixed == "norms":
            for norm in _norms(model):
                norm.requires_grad_(False)
        if draw.groups_last:
            self._turn_on(model)
        return hooks

    def _turn_on(self, model: nn.Module) -> None:
        """Turn groups on, which runs the model, and leave no trace of this run."""
        if self.with_groups is None:
            return
        record, LOG.record = LOG.record, Record()
        state = copy.deepcopy(model.state_dict())
        for module in model.modules() if self.draw.tunes else ():
            if isinstance(module, nn.modules.conv._ConvNd) and why_left_alone(module) is None:
                make_tunable(module)
        with self._autocast():
            has_groups = self.with_groups(model, lambda run: run(self._inputs(0, self.draw.steps[0].batch_sizes[0], 9)))
        record.has_groups = has_groups
        model.load_state_dict(state)
        LOG.record = record
        LOG.begin_step(0, sees_backward=LOG.sees_backward)

    def _load(self, model: nn.Module, start: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(self.noise)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(self._noisy(start[name].double(), generator))

    def _noisy(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        if not self.noise:
            return tensor
        bit = torch.finfo(torch.bfloat16 if self.draw.autocast else self.draw.dtype).eps
        return tensor * (1 + bit * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))

    def _inputs(self, step: int, batch_size: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.numbers + 10 * step + part)
        shape = batch_size, 3, *self.draw.extent
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x[:1, 0] += self.draw.offset
        x[1:] += 0 if math.isnan(self.draw.offset) else self.draw.offset
        x = x.to(self.draw.dtype).double()
        x = self._noisy(x, torch.Generator().manual_seed(self.noise + step))
        x = x.to(torch.float64 if self.is_exact else self.draw.dtype)
        x = _laid_out(x, self.draw.x_format)
        return x.requires_grad_(self.draw.needs_dx)

    def _changed(self, model: nn.Module, event: str, step: Step, hooks: list[Any]) -> nn.Module:
        """Let something happen to the model; return it, or another one in its place."""
        if event in EVALUATIONS:
            with EVALUATIONS[event](), self._autocast():
                _record_outputs("evaluated", model.eval()(self._inputs(LOG.step, 2, 7)))
            model.train()
        elif event == "no hooks":
            for handle in hooks:
                handle.remove()
        elif event == "other format" and len(self.draw.extent) == 2 and not self.is_exact:
            model.to(memory_format=torch.channels_last)
        elif event == "float64 and back" and not self.draw.mixed:
            model.double()
            if not self.is_exact:
                model.to(self.draw.dtype)
        elif event in REPLACEMENTS:
            model = REPLACEMENTS[event](model)
        else:
            norms = _norms(model)
            for norm in norms[:: 1 + len(step.events) % 2]:
                _change_norm(norm, event)
        return model

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.draw.autocast and not self.is_exact)

    def _take(self, model: nn.Module, step: Step) -> None:
        ways = {"functional": self._functional, "grad": self._grad, "no_grad": self._no_grad, "func": self._func}
        ways["forward mode"] = self._forward_mode
        if step.way in ways:
            ways[step.way](model, step)
            return
        parameters = dict(model.named_parameters())
        needing = [parameter for parameter in parameters.values() if parameter.requires_grad]
        optimizer = torch.optim.SGD([*needing, nn.Parameter(torch.zeros(()))], lr=0.002)
        keeps = step.way == "keep gradients"
        if keeps:
            for parameter in needing:
                parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none=not keeps)
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: LOG.event("gradients", name.split(".")[0])
            )
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]
        if step.way == "thread":
            _in_thread(partial(self._backward, model, step))
        else:
            self._backward(model, step)
        optimizer.step()
        for name, parameter in parameters.items():
            LOG.value(f"gradient of {name}", parameter.grad)
            LOG.value(f"parameter {name}", parameter)
        for handle in handles:
            handle.remove()

    def _backward(self, model: nn.Module, step: Step) -> None:
        """Run the model and backpropagate, one part of the batch after the other, or both at once."""
        inputs = [self._inputs(LOG.step, size, part) for part, size in enumerate(step.batch_sizes)]
        losses, results = [], []
        for part, x in enumerate(inputs):
            with ExitStack() as stack:
                if step.way in MODES:
                    stack.enter_context(MODES[step.way]())
                with self._autocast():
                    outputs = model(x)
                loss = self._loss(outputs)
            LOG.value(f"loss {part}", loss)
            losses.append(loss)
            results += [(f"output {part} {number}", one) for number, one in enumerate(tree_leaves(outputs))]
            if step.way != "two forwards" and loss.requires_grad:
                self._backward_of(model, x, loss, outputs, step)
        if step.way == "two forwards" and losses[0].requires_grad:
            (losses[0] * losses[1].detach() + losses[1]).backward()
        for part, x in enumerate(inputs):
            LOG.value(f"gradient of x {part}", x.grad)
        LOG.watched += results

    def _backward_of(self, model: nn.Module, x: Tensor, loss: Tensor, outputs: Any, step: Step) -> None:
        if step.way == "second order":
            needing = [one for one in (x, *model.parameters()) if one.requires_grad]
            gradients = torch.autograd.grad(loss, needing, create_graph=True, allow_unused=True)
            loss = loss + 0.1 * sum(wide(one).square().mean() for one in gradients if one is not None)
        if step.way == "evaluate between":
            with torch.no_grad(), self._autocast():
                _record_outputs("between", model.eval()(self._inputs(LOG.step, 3, 5)))
            model.train()
        if step.way == "pieces":
            for output in tree_leaves(outputs):
                if output.requires_grad:
                    wide(output).sum().backward(retain_graph=True)
        loss.backward(retain_graph=step.way == "retain")
        if step.way == "retain":
            loss.backward()
        if step.way == "twice":
            self._backward_again(loss)

    def _backward_again(self, loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            LOG.fact("backward again", type(error).__name__)
        else:
            LOG.fact("backward again", "passes")

    def _loss(self, outputs: Any) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for index, output in enumerate(tree_leaves(outputs)):
            generator = torch.Generator().manual_seed(100 * LOG.step + index)
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            loss = loss + (wide(output) * weights).sum() + 0.5 * wide(output).square().mean()
        return loss

    def _functional(self, model: nn.Module, step: Step) -> None:
        """Take no step, but the gradients of other parameters, and statistics of other buffers."""
        parameters = {name: (1.5 * one.detach()).requires_grad_() for name, one in model.named_parameters()}
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        x = self._inputs(LOG.step, step.batch_sizes[0], 0)
        with self._autocast():
            outputs = torch.func.functional_call(model, (parameters, buffers), (x,))
        _record_outputs("output", outputs)
        gradients = torch.autograd.grad(self._loss(outputs), [*parameters.values()], allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            LOG.value(f"gradient of {name}", gradient)
        for name, buffer in buffers.items():
            LOG.value(f"functional buffer {name}", buffer)

    def _grad(self, model: nn.Module, step: Step) -> None:
        """Take no step, but some of the gradients."""
        x = self._inputs(LOG.step, step.batch_sizes[0], 0)
        with self._autocast():
            outputs = model(x)
        _record_outputs("output", outputs)
        needing = {name: one for name, one in (("x", x), *model.named_parameters()) if one.requires_grad}
        asked = dict([*needing.items()][:: 1 + len(needing) % 3])
        if asked:
            for name, gradient in zip(
                asked, torch.autograd.grad(self._loss(outputs), [*asked.values()], allow_unused=True), strict=True
            ):
                LOG.value(f"gradient of {name}", gradient)

    def _func(self, model: nn.Module, step: Step) -> None:
        """Take no step, but torch.func's gradients."""
        x = self._inputs(LOG.step, step.batch_sizes[0], 0)
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        buffers = {name: one.clone() for name, one in model.named_buffers()}

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            copies = {name: one.clone() for name, one in buffers.items()}
            return self._loss(torch.func.functional_call(model, (parameters, copies), (x.detach(),)))

        for name, gradient in torch.func.grad(loss)(parameters).items():
            LOG.value(f"gradient of {name}", gradient)

    def _forward_mode(self, model: nn.Module, step: Step) -> None:
        """Take no step, but a derivative by forward-mode differentiation."""
        x = self._inputs(LOG.step, step.batch_sizes[0], 0)
        with forward_ad.dual_level():
            outputs = model(forward_ad.make_dual(x, x.detach().cos()))
            for index, output in enumerate(tree_leaves(outputs)):
                LOG.value(f"tangent {index}", forward_ad.unpack_dual(output).tangent)

    def _no_grad(self, model: nn.Module, step: Step) -> None:
        """Take no step: update the statistics of norms."""
        with torch.no_grad(), self._autocast():
            outputs = model(self._inputs(LOG.step, step.batch_sizes[0], 0))
        _record_outputs("output", outputs)


def _change_norm(norm: nn.Module, event: str) -> None:
    if event == "freeze":
        norm.eval()
    elif event == "thaw":
        norm.train()
    elif event == "eps" and hasattr(norm, "eps"):
        norm.eps = 0.03
    elif event == "momentum" and hasattr(norm, "momentum"):
        norm.momentum = 0.7 if norm.momentum is None else None
    elif event == "new weight" and isinstance(getattr(norm, "weight", None), Tensor):
        norm.weight = nn.Parameter(norm.weight.detach() * 2)
    elif event == "reset" and hasattr(norm, "reset_running_stats"):
        norm.reset_running_stats()
    elif event == "fix weights":
        norm.requires_grad_(False)


def _in_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept * 1),
    "function mode": _Functions,
    "dispatch mode": _Dispatched,
}


def _loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(model.state_dict())
    return model


EVALUATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **{"eval": torch.no_grad, "inference": torch.inference_mode, "eval with gradients": nullcontext}
}
REPLACEMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "load": _loaded,
    "sync": nn.SyncBatchNorm.convert_sync_batchnorm,
}


def _record_outputs(name: str, outputs: Any) -> None:
    LOG.fact(f"{name} type", type(outputs).__name__)
    for index, output in enumerate(tree_leaves(outputs)):
        LOG.value(f"{name} {index}", output)


def _laid_out(x: Tensor, name: str) -> Tensor:
    if name == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if name == "slice":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    if name == "permuted":
        return x.transpose(2, -1).contiguous().transpose(2, -1)
    return x


# Comparing.


def with_groups(model: nn.Module, run: Callable[[nn.Module], object]) -> bool:
    """Turn groups on in a model, and return whether they are: not if it writes what a norm has read."""
    try:
        make_groups(model, run)
    except ChangedError:
        return False
    return True


class Comparison:
    """The steps of a draw by PyTorch and with groups, of the same numbers.

    with_groups: turns groups on.
    """

    def __init__(self, draw: Draw, numbers: int, with_groups: WithGroups = with_groups) -> None:
        usual = Runner(draw, numbers)
        is_checkpointed = any(one is not None for one in draw.checkpoints)
        self.torchs = replace(usual, is_checkpointed=False).run()
        self.again = replace(usual, starts=self.torchs.starts)
        self.draw = draw
        self.dtype = torch.bfloat16 if draw.autocast else draw.dtype
        if is_checkpointed:
            once, self.torchs = self.torchs, self.again.run()
        self.groups = replace(self.again, with_groups=with_groups).run()
        if is_checkpointed and self.groups.has_groups:  # which update no statistics where they recompute
            self.torchs.values |= {name: value for name, value in once.values.items() if " buffer " in name}
        # Contiguous: of a batch of 1, PyTorch 2.13 takes some gradients in channels_last for contiguous ones.
        plain = replace(draw, x_format="contiguous", model_format="contiguous")
        self.exact = replace(self.again, draw=plain, is_exact=True, is_checkpointed=False).run()
        self.noisy: list[Record] = []
        gradients = (value for name, value in self.exact.values.items() if "gradient of" in name)
        self.largest_gradient = max((value.nan_to_num(0, 0, 0).norm().item() for value in gradients), default=0.0)

    def differences(self) -> dict[str, str]:
        """Return what is wrong with groups, by where it is."""
        torchs, groups = self.torchs.raised, self.groups.raised
        if torchs is not None and groups is None and re.search("in-?place", str(torchs)):
            return {}  # what groups keep is not what PyTorch's operators keep: what may be written is not the same
        if type(torchs) is not type(groups):
            return {"raised": f"{groups!r}, not {torchs!r}"}
        wrong = dict(self._wrong_facts()) if torchs is None else {}
        suspects = [name for name in self.torchs.values if not self._is_near(name)]
        if suspects:
            self.noisy = [replace(self.again, noise=noise, is_checkpointed=False).run() for noise in (1, 2, 3)]
            wrong |= {name: self._description(name) for name in suspects if not self._is_near(name)}
        return wrong

    def ratios(self) -> list[float]:
        """Return the logarithms of the errors of float32 with groups over PyTorch's, where they are not the same."""
        if self.dtype is not torch.float32 or self.torchs.raised or self.groups.raised:
            return []
        values = self.torchs.values, self.groups.values
        errors = [
            self._errors(name)
            for name, value in values[0].items()
            if not torch.equal(value, values[1].get(name, value))
        ]
        some = [(error, torchs) for error, torchs in filter(None, errors) if 0 < min(error, torchs) < math.inf]
        return [max(-2.0, min(2.0, math.log(error / torchs))) for error, torchs in some]

    def _wrong_facts(self) -> Iterator[tuple[str, str]]:
        torchs, groups = self.torchs.facts, self.groups.facts
        new = {*groups.pop("warnings")} - {*torchs.pop("warnings")}
        if new:
            yield "warnings", f"{sorted(new)}"
        for name in sorted(torchs.keys() | groups.keys()):
            if name not in torchs and "tensor hook" in name:
                continue  # in-place operations on views, of which instance norm's result is one, lose PyTorch's
            if torchs.get(name) != groups.get(name):
                yield name, f"{groups.get(name, 'missing')}, not {torchs.get(name, 'missing')}"

    def _errors(self, name: str) -> tuple[float, float] | None:
        """Return the errors with groups and of PyTorch, in any of its runs; None if they cannot be told."""
        torchs, groups, exact = (one.values.get(name) for one in (self.torchs, self.groups, self.exact))
        if groups is None or exact is None or torchs is None or not torchs.shape == groups.shape == exact.shape:
            return None
        if math.isnan(self.draw.offset) and re.search("gradient|parameter|hook", name):
            return None  # PyTorch's operators differ in which gradients they take NaN for
        if not (torchs.isfinite().all() and exact.isfinite().all()):
            return 0.0 if torch.equal(torchs.isnan(), groups.isnan()) else math.inf, 0.0
        runs = [torchs, *(one.values[name] for one in self.noisy if name in one.values)]
        noise = max((one - exact).norm().item() for one in runs if one.isfinite().all())
        return (groups - exact).norm().item(), noise

    def _is_near(self, name: str) -> bool:
        error, noise = self._errors(name) or (0.0, 0.0)
        exact, finfo = self.exact.values.get(name), torch.finfo(self.dtype)
        size = 0.0 if exact is None else exact.nan_to_num(0, 0, 0).norm().item()
        # A sum that is zero but for rounding may be zero in PyTorch's runs.
        least = finfo.eps / 16 if finfo.bits == 16 else finfo.eps
        rounding = 2 * finfo.eps * size + least * self.largest_gradient
        return error <= FACTORS[self.dtype] * noise + rounding

    def _description(self, name: str) -> str:
        error, noise = self._errors(name) or (math.nan, math.nan)
        return f"error {error:.3g}, PyTorch's {noise:.3g}, norm {self.exact.values[name].norm().item():.3g}"


def differences(draw: Draw, with_groups: WithGroups = with_groups, *, attempts: int = 3) -> dict[str, str]:
    """Return what is wrong with groups for each of several numbers, by where it is."""
    wrong = Comparison(draw, 1, with_groups).differences()
    for numbers in range(2, attempts + 1):
        if wrong:
            still = Comparison(draw, numbers, with_groups).differences()
            wrong = {name: text for name, text in wrong.items() if name in still}
    return wrong
