"""Random networks of convolutions, norms, additions and activations, written as Python from a seed.

A network is text: the layers and the lines of ``forward`` of each block, as users write them. What fails can be read,
and copied into a script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from random import Random
from types import CodeType
from typing import Any

import torch
from support.step_records import LOG
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class BatchNormAct(nn.BatchNorm2d):
    """A norm with its activation, which calls the function itself, after timm's ``BatchNormAct2d``."""

    def __init__(self, channels: int, act: nn.Module, drop: float = 0.0) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        running = self.running_mean, self.running_var
        y = F.batch_norm(input, *running, self.weight, self.bias, self.training, factor, self.eps)
        return self.act(self.drop(y))


class ScaledBatchNorm(nn.BatchNorm2d):
    """A norm whose forward goes on after torch's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


class ClampedBatchNorm(nn.BatchNorm2d):
    """A norm that changes its own result in place."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp_(-1.5, 1.5)


class LayerNorm2d(nn.LayerNorm):
    """A norm of each pixel over its channels, as in ConvNeXt."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class OwnNorm(nn.Module):
    """A module that is no norm of torch's, and calls a function of torch."""

    def __init__(self, channels: int, function: str) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        if self.function == "layer_norm":
            return F.layer_norm(x.movedim(1, -1), self.gamma.shape, self.gamma, self.beta).movedim(-1, 1)
        if self.function == "group_norm":
            return F.group_norm(x, 1, self.gamma, self.beta, 1e-3)
        if self.function == "instance_norm":
            return F.instance_norm(x, weight=self.gamma, bias=self.beta)
        return F.batch_norm(x, None, None, self.gamma, self.beta, training=True)


class Swish(torch.autograd.Function):
    """SiLU that keeps only its input, as the memory-efficient one of EfficientNet-PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return Swish.backward(ctx, tangent)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return dy * (gate * (1 + x * (1 - gate)))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Linear(channels, 3), nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.expand(F.relu(self.reduce(x.flatten(2).mean(2)))))
        return x * gate.reshape(*gate.shape, *(1,) * (x.dim() - 2))


def wide(x: Tensor) -> Tensor:
    """Return x in the next wider type, and in float64 as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x.double()


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor, use_reentrant: bool) -> Tensor:
    if not LOG.checkpoints:
        return block(x)
    result: Tensor = checkpoint(block, x, use_reentrant=use_reentrant)
    return result


NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "wide": wide, "checkpointed": checkpointed}
NAMES |= {"log": LOG, "Swish": Swish, "SqueezeExcite": SqueezeExcite, "OwnNorm": OwnNorm, "LayerNorm2d": LayerNorm2d}
NAMES |= {name.__name__: name for name in (BatchNormAct, ScaledBatchNorm, ClampedBatchNorm)}


@lru_cache(maxsize=256)
def _compiled(lines: tuple[str, ...]) -> CodeType:
    return compile("\n".join(("def forward(self, x):", *(f"    {line}" for line in lines))), "<forward>", "exec")


class Written(nn.Module):
    """A module of layers and of a forward that are text."""

    def __init__(self, layers: dict[str, str | nn.Module], lines: Sequence[str]) -> None:
        super().__init__()
        self.layers, self.lines = {name: str(layer) for name, layer in layers.items()}, tuple(lines)
        for name, layer in layers.items():
            setattr(self, name, eval(layer, NAMES) if isinstance(layer, str) else layer)

    def forward(self, x: Tensor) -> Any:
        defined: dict[str, Any] = {}
        exec(_compiled(self.lines), NAMES, defined)
        return defined["forward"](self, x)

    def __str__(self) -> str:
        indented = [(name, text.replace("\n", "\n    ")) for name, text in self.layers.items()]
        return "\n    ".join(("", *(f"{name} = {text}" for name, text in indented), *self.lines))


MODULES = [
    *("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU6()", "nn.ReLU6(True)"),
    *("nn.LeakyReLU(0.2, inplace=True)", "nn.LeakyReLU()", "nn.LeakyReLU(0.0)", "nn.LeakyReLU(-0.5)", "nn.SiLU()"),
    *("nn.SiLU(inplace=True)", "nn.Hardswish()", "nn.Hardswish(inplace=True)", "nn.GELU()", "nn.GELU('tanh')"),
    *("nn.Sigmoid()", "nn.ELU()", "nn.Mish()", "nn.PReLU()", "nn.Dropout(0.3)", "nn.Identity()", "nn.Tanh()"),
    *("nn.Hardtanh(0.0, 6.0)", "nn.Dropout(0.2, inplace=True)", "nn.Hardsigmoid()", "nn.Softplus()"),
    "nn.Sequential(nn.Dropout(0.2), nn.ReLU())",
]
SPELLINGS = [
    *("F.relu({0})", "F.relu({0}, inplace=True)", "torch.relu({0})", "torch.relu_({0})", "{0}.relu()", "{0}.relu_()"),
    *("F.relu({0})", "F.relu({0}, True)", "F.relu_({0})", "torch.relu(input={0})", "F.relu(input={0}, inplace=True)"),
    *("{0}.clamp(min=0)", "{0}.clamp(0, 6)", "torch.clamp({0}, min=0)", "{0}.clamp_(min=0)", "{0}.clamp_min(0)"),
    *("F.relu6({0})", "F.relu6({0}, inplace=True)", "F.hardtanh({0}, 0.0, 6.0)", "F.hardtanh({0})"),
    *("F.leaky_relu({0}, 0.1)", "F.leaky_relu({0}, 0.1, True)", "F.leaky_relu({0}, 0)", "F.leaky_relu({0}, -0.3)"),
    *("F.leaky_relu({0}, negative_slope=0.3)", "F.leaky_relu_({0}, 0.2)", "F.leaky_relu({0}, 1.5)"),
    *("F.silu({0})", "F.silu({0}, inplace=True)", "{0} * torch.sigmoid({0})", "{0} * {0}.sigmoid()", "F.mish({0})"),
    *("{0}.mul(torch.sigmoid({0}))", "F.hardswish({0})", "F.hardswish({0}, True)", "{0} * F.relu6({0} + 3) / 6"),
    *("F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.gelu({0}, approximate='none')", "torch.sigmoid({0})"),
    *("F.elu({0})", "F.elu({0}, inplace=True)", "torch.where({0} > 0, {0}, 0.1 * {0})", "F.threshold({0}, 0.1, 0)"),
    *("torch.maximum({0}, torch.zeros_like({0}))", "F.dropout({0}, 0.3, self.training)", "torch.tanh({0})"),
    *("{0}.abs()", "{0} ** 2", "torch.nn.functional.relu(F.dropout({0}, 0.2, self.training))", "Swish.apply({0})"),
]
ADDITIONS = [
    *("{0} + {1}", "{1} + {0}", "{0} + {1}", "{1} + {0}", "torch.add({0}, {1})", "torch.add({1}, {0})", "{0}.add({1})"),
    *("{1}.add({0})", "torch.add({0}, {1}, alpha=0.5)", "torch.add({1}, {0}, alpha=-2)", "{0}.add({1}, alpha=0.5)"),
    *("{0} - {1}", "{1} - {0}", "sum([{0}, {1}])", "torch.add(input={0}, other={1})", "{0} + 0.5 * {1}"),
    *("{0}.__add__({1})", "torch.stack([{0}, {1}]).sum(0)", "torch.sum(torch.stack([{0}, {1}]), dim=0)"),
    *("{0} + {1} + {0}", "1 + {0} + {1}", "({0} + 0.5) + {1}"),
]
ADDITIONS_IN_PLACE = [
    "{0}.add_({1})",
    "{0} += {1}",
    "{0}.add_({1}, alpha=0.5)",
    "{0} -= {1}",
    "torch.Tensor.add_({0}, {1})",
]


class Writer:
    """Writes a block: its layers and its lines. ``channels`` and ``extent`` are those of what it has written so far."""

    def __init__(self, random: Random, channels: int, extent: tuple[int, ...], *, is_recomputed: bool = False) -> None:
        self.random, self.channels, self.extent = random, channels, extent
        self.dims, self.is_recomputed = len(extent), is_recomputed
        self.layers: dict[str, str | nn.Module] = {}
        self.lines: list[str] = []
        self.names = 0

    def layer(self, text: str) -> str:
        """Add a layer; return how ``forward`` names it."""
        name = f"l{len(self.layers)}"
        self.layers[name] = text
        return f"self.{name}"

    def let(self, text: str) -> str:
        """Give a result a name, which is returned."""
        self.names += 1
        self.lines.append(f"h{self.names} = {text}")
        return f"h{self.names}"

    def do(self, *lines: str) -> None:
        self.lines += lines

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def conv(self, channels: int | None = None, kind: str | None = None) -> str:
        """Return a convolution, as text, that keeps the extent."""
        random, inputs, dims = self.random, self.channels, self.dims
        kind = kind or random.choice(["3", "3", "1", "1", "depthwise", "transposed"])
        kind = "3" if kind == "depthwise" and channels not in (None, inputs) else kind
        outputs = self.channels = inputs if kind == "depthwise" else (channels or random_channels(random))
        bias = random.choice(["", ", bias=False"])
        if kind == "1":
            return f"nn.Conv{dims}d({inputs}, {outputs}, 1{bias})"
        if kind == "transposed":
            return f"nn.ConvTranspose{dims}d({inputs}, {outputs}, 3, padding=1{bias})"
        groups = f", groups={inputs}" if kind == "depthwise" else ""
        return f"nn.Conv{dims}d({inputs}, {outputs}, 3, padding=1{groups}{bias})"

    def norm_layer(self) -> str:
        """Return a norm that takes (N, C, ...), as text."""
        random, channels, dims = self.random, self.channels, self.dims
        options = []
        kind = random.choices(["batch", "instance", "group", "own", "users", "pixels"], [9, 2, 2, 1, 2, 1])[0]
        if kind in ("users", "pixels") and dims == 2:
            act = random.choice([*MODULES[:8], "nn.SiLU()", "nn.GELU()", "nn.Identity()"])
            drop = random.choice(["", "", ", drop=0.2"])
            users = [f"BatchNormAct({channels}, {act}{drop})", f"BatchNormAct({channels}, {act})"]
            users += [f"ScaledBatchNorm({channels})", f"ClampedBatchNorm({channels})"]
            return random.choice(users) if kind == "users" else f"LayerNorm2d({channels})"
        if kind == "own":
            functions = ["layer_norm", "group_norm", "instance_norm", "batch_norm"]
            return f"OwnNorm({channels}, {random.choice(functions)!r})"
        if kind == "group":
            groups = random.choice([count for count in range(1, channels + 1) if channels % count == 0])
            return f"nn.GroupNorm({groups}, {channels}{random.choice(['', '', ', affine=False', ', eps=1e-3'])})"
        if kind == "instance":
            options = [", affine=True", ", track_running_stats=True"]
            return f"nn.InstanceNorm{dims}d({channels}{''.join(one for one in options if self.maybe(0.5))})"
        options = [", momentum=None", ", momentum=0.3", ", eps=1e-2", ", affine=False", ", track_running_stats=False"]
        return (
            f"nn.BatchNorm{dims}d({channels}{''.join(random.sample(options, random.choice([0, 0, 0, 1, 2])))})".replace(
                "momentum=None, momentum=0.3", "momentum=None"
            ).replace("momentum=0.3, momentum=None", "momentum=0.3")
        )

    def norm(self, name: str) -> str:
        """Return the name of the normalized values."""
        if self.maybe(0.07):
            order = (0, *range(2, self.dims + 2), 1), (0, self.dims + 1, *range(1, self.dims + 1))
            layer = self.layer(f"nn.LayerNorm({self.channels})")
            return self.let(f"{layer}({name}.permute{order[0]}).permute{order[1]}")
        return self.let(f"{self.layer(self.norm_layer())}({name})")

    def act_text(self, name: str) -> str:
        if self.maybe(0.4):
            return f"{self.layer(self.random.choice(MODULES))}({name})"
        return self.random.choice(SPELLINGS).format(name)

    def act(self, name: str) -> str:
        text = self.act_text(name)
        if text.startswith(("torch.relu_", "F.relu_")) and self.maybe(0.5):  # as a statement
            self.do(text)
            return name
        return self.let(text)

    def normed(self, name: str, channels: int | None = None) -> str:
        """Return the name of a convolution's normalized results, or of normalized ``name``."""
        if self.maybe(0.85) or channels is not None:
            name = self.let(f"{self.layer(self.conv(channels))}({name})")
        return self.norm(name)

    def added(self, first: str, second: str) -> str:
        """Return the name of a sum; the first is not the block's input, and may be written."""
        if self.maybe(0.3) and first != "x":
            text = self.random.choice(ADDITIONS_IN_PLACE).format(first, second)
            if "=" in text.split("(")[0] or self.maybe(0.5):
                self.do(text)
                return first
            return self.let(text)
        if self.maybe(0.1) and second != "x":
            self.do(f"{second} += {first}")
            return second
        if self.maybe(0.2) and second == "x" and not self.is_recomputed:
            self.do(f"x += {first}")
            return "x"
        return self.let(self.random.choice(ADDITIONS).format(first, second))

    # The kinds of blocks. Each returns the name of its result.

    def usual(self) -> str:
        if self.maybe(0.4):
            layers = [self.conv(), self.norm_layer(), self.random.choice(MODULES)]
            return self.let(f"{self.layer('nn.Sequential(' + ', '.join(layers) + ')')}(x)")
        return self.act(self.normed("x"))

    def preactivated(self) -> str:
        channels = self.channels
        name = self.act(self.norm("x"))
        name = self.let(f"{self.layer(self.conv(channels))}({name})")
        return self.added(name, "x") if self.maybe(0.7) else name

    def residual(self) -> str:
        """Two convolutions beside the identity or a projection; both branches may end in norms."""
        channels = self.channels
        first = self.act(self.normed("x", self.random.choice([channels, 5])))
        last = self.normed(first, channels if self.maybe(0.6) else random_channels(self.random))
        if self.channels == channels and self.maybe(0.6):
            short = "x"
        else:
            inside, self.channels = self.channels, channels
            short = (
                self.normed("x", inside) if self.maybe(0.8) else self.let(f"{self.layer(self.conv(inside, '1'))}(x)")
            )
        if self.maybe(0.15):
            short = self.let(f"{short}.detach()")
        total = self.added(*self.random.choice([(last, short), (last, short), (short, last)]))
        return self.act(total) if self.maybe(0.85) else total

    def three_branches(self) -> str:
        """RepVGG: norms of a 3x3 convolution, of a 1x1 convolution and of the identity are added."""
        channels = self.channels
        names = [self.normed("x", channels), self.normed("x", channels), self.norm("x")]
        self.random.shuffle(names)
        total = self.let(self.random.choice(["{} + {} + {}", "{} + ({} + {})", "sum([{}, {}, {}])"]).format(*names))
        return self.act(total)

    def alone(self) -> str:
        return self.normed("x")

    def twice(self) -> str:
        return self.act(self.norm(self.normed("x")))

    def used_twice(self) -> str:
        n = self.normed("x")
        forms = ["F.relu({0}) + {0}", "{0} + F.relu({0})", "{0} * torch.sigmoid({0})", "{0} + {0}", "{0} * {0}"]
        forms += ["F.relu({0}) * F.silu({0})", "F.relu({0}) - F.relu(-{0})", "F.relu({0}) + {0}.mean()"]
        forms += ["F.relu({0} + {0})", "torch.add({0}, {0}, alpha=-0.5)", "F.leaky_relu({0}, 0.1) + F.relu({0}) + {0}"]
        forms += ["F.relu(F.relu({0}))", "F.relu6(F.silu({0}))", "F.relu({0} + F.relu({0}))"]
        return self.let(self.random.choice(forms).format(n))

    def written_then_used(self) -> str:
        """A group's tensor is read again after an activation or addition in place, which changes it."""
        n = self.normed("x")
        if self.maybe(0.5):
            text = self.random.choice(ADDITIONS_IN_PLACE).format(n, self.let("x.mean()"))
            self.do(text)
        text = self.random.choice(["F.relu_({0})", "F.silu({0}, inplace=True)", "{0}.relu_()", "{0}.clamp_(min=0)"])
        other = self.let(text.format(n))
        return self.let(self.random.choice(["{0} + {1}", "{0} * 1.5", "{1} + 0.5 * {0}"]).format(n, other))

    def other_names(self) -> str:
        """Views and other names of a norm's output, before it is written in place."""
        n = self.normed("x")
        half = max(1, self.channels // 2)
        ways = [
            [f"v = {n}[:, :{half}]", "v.relu_()"],
            [f"v = {n}[:, :{half}]", "v += 1"],
            [f"v = {n}.view({n}.shape)", "v.mul_(2)"],
            [f"v = {n}", "v += x.mean()", "v = F.relu(v, inplace=True)"],
            [f"v = {n}.detach()", f"{n} = {n} * v.abs().mean()"],
            [f"v = {n}.data", f"{n} = {n} + v.mean()"],
            [f"{n}[:, 0] = 0"],
            [f"{n}.mul_(0.5)"],
            [f"{n}.add_(1.0)"],
            [f"{n} *= 2"],
            [f"{n}[{n} < 0] = 0"],
            [f"{n}.copy_({n} * 2)"],
        ]
        self.do(*self.random.choice(ways))
        return self.act(n)

    def views(self) -> str:
        n = self.normed("x")
        channels = self.channels
        forms = ["{0}.flatten(2).reshape({0}.shape)", "{0}.reshape({0}.shape)", "{0}.contiguous()", "{0}.clone()"]
        forms += ["{0}.transpose(2, -1).transpose(2, -1)", "{0}.unsqueeze(0).squeeze(0)", "{0}.flip(2)", "{0}[...]"]
        forms += ["torch.cat(torch.split({0}, 1, 1), 1)", "{0}.to({0}.dtype)", "{0}.expand_as({0})", "{0}.type_as(x)"]
        if channels % 2 == 0:
            forms += ["torch.cat({0}.chunk(2, 1)[::-1], 1)", "torch.cat([F.relu(c) for c in {0}.chunk(2, 1)], 1)"]
            forms += ["{0}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)"]  # channels are shuffled
            forms += ["(lambda a, b: torch.cat([a, F.relu(b)], 1))(*{0}.chunk(2, 1))"]
        return self.act(self.let(self.random.choice(forms).format(n)))

    def dense(self) -> str:
        channels = self.channels
        y = self.act(self.normed("x", 3))
        self.channels += channels
        forms = [f"torch.cat([x, {y}], 1)", f"torch.cat(({y}, x), dim=1)", f"torch.concat([x, {y}], 1)"]
        return self.let(self.random.choice(forms))

    def concatenated_norms(self) -> str:
        channels = self.channels
        a = self.normed("x", 3)
        first, self.channels = self.channels, channels
        b = self.normed("x", 4)
        self.channels += first
        return self.act(self.let(f"torch.cat([{a}, {b}], 1)"))

    def squeeze_excite(self) -> str:
        name = self.normed("x")
        name = name if self.maybe(0.3) else self.act(name)
        name = self.let(f"{self.layer(f'SqueezeExcite({self.channels})')}({name})")
        return self.norm(name) if self.maybe(0.3) else name

    def own_function(self) -> str:
        n = self.normed("x")
        return self.let(
            self.random.choice(["Swish.apply({0})", "Swish.apply({0}) + {0}", "Swish.apply({0} + 1)"]).format(n)
        )

    def without_gradients(self) -> str:
        """Parts of a block under ``no_grad``, where also what a norm has read may be written."""
        c = self.let(f"{self.layer(self.conv(self.channels))}(x)")
        norm = self.layer(self.norm_layer())
        ways = [
            ["with torch.no_grad():", f"    n = {norm}({c})", "y = F.relu(n) + x"],
            ["with torch.no_grad():", f"    n = {norm}({c})", f"    {c}.mul_(0)", "    y = F.relu(n)", "y = x + y"],
            ["with torch.no_grad():", f"    n = F.relu({norm}({c}) + x)", "y = x * n"],
            [f"n = {norm}({c})", "with torch.no_grad():", "    m = F.relu(n)", "y = F.relu(n) * m"],
            [f"n = {norm}({c})", "with torch.no_grad():", "    m = F.relu(n + x)", "y = n + m"],
            [f"n = {norm}({c})", "with torch.no_grad():", "    n.mul_(2)", "y = F.relu(n)"],
            [f"n = {norm}({c}.detach().contiguous())", "y = F.relu(n + x)"],  # PyTorch 2.13 fails in channels_last
            [
                "with torch.no_grad():",
                f"    n = {norm}({c})",
                "    with torch.enable_grad():",
                "        y = F.relu(n + x)",
            ],
        ]
        self.do(*self.random.choice(ways))
        return "y"

    def control(self) -> str:
        """Python that asks a norm's output for what it is and holds."""
        n = self.normed("x")
        ways = [
            [f"if {n}.square().mean() > 0.3:", f"    {n} = F.relu({n})", "else:", f"    {n} = {n} * 2"],
            [f"if float({n}.detach().abs().max()) > 0.7:", f"    {n} = F.silu({n})"],
            [f"assert {n}.shape[0] == x.shape[0] and {n}.dim() == x.dim()", f"{n} = F.relu({n} / {n}.size(2))"],
            [f"{n} = F.relu({n} + torch.zeros_like({n}) + {n}.new_ones(()))"],
            [f"assert isinstance({n}, torch.Tensor) and {n}.ndim == {self.dims + 2}", f"{n} = F.relu({n})"],
            [f"{n} = {n} / math.sqrt({n}.numel() / len({n}))", f"{n} = F.relu({n}, inplace=True)"],
            [f"{n} = {n} + torch.as_tensor({n}.detach().double().numpy()).abs().mean().to({n}.dtype)"],
            [f"{n}.note = 2.0", f"{n} = F.relu({n} * {n}.note)"],
            [f"assert not {n}.requires_grad or {n}.grad_fn is not None", f"{n} = F.relu({n})"],
            [f"assert {n}.is_contiguous() == ({n} + 0).is_contiguous()", f"{n} = F.relu({n})"],
            [f"{n} = torch.stack([F.relu(one) for one in {n}])"],
            ["for _ in range(2):", f"    {n} = F.relu({n} + 0.1)"],
        ]
        self.do(*self.random.choice(ways))
        return n

    def observed(self) -> str:
        """Hooks on tensors, kept gradients and kept tensors within a block."""
        n = self.normed("x")
        watch = self.random.choice(["hook", "hook", "doubling_hook", "retain", "keep"])
        if self.maybe(0.5):
            self.do(f"log.{watch}({n})")
            return self.act(n)
        total = self.added(n, self.let(f"0.5 * {n}.detach()"))
        self.do(f"log.{watch}({total})")
        y = self.act(total)
        self.do(f"log.{watch}({y})")
        return y

    def changed_addend(self) -> str:
        """What was added is written between the addition and the activation."""
        n = self.normed("x", self.channels)
        r = self.let("x * 0.5")
        self.do(f"s = {n} + {r}", f"{r}.{self.random.choice(['mul_(0)', 'relu_()', 'add_(3)'])}")
        return self.let(f"{self.act('s')} + {r}")

    def broadcast(self) -> str:
        ones = ", 1" * self.dims
        if self.maybe(0.3):  # the norm's output is the smaller one
            pooled = self.let("x.mean(-1, keepdim=True)")
            n = self.norm(pooled)
            return self.act(self.let(self.random.choice(["x + {0}", "{0} + x", "torch.add(x * 1, {0})"]).format(n)))
        n = self.normed("x")
        addends = [self.layer(f"nn.Parameter(torch.rand(1, {self.channels}{ones}))"), "x.mean(1, keepdim=True)"]
        addends += ["0.25", "torch.ones((), dtype=x.dtype)", "x.mean()", f"{n}.detach().mean(0, keepdim=True)"]
        addends += [self.layer(f"nn.Parameter(torch.rand({self.channels}{ones}))"), "x[:1, :1]", "1", "True"]
        addend = self.let(self.random.choice(addends))
        ways = ["{0} + {1}", "{1} + {0}", "torch.add({0}, {1})", "{0}.add({1})", "{0}.add_({1})", "{0}.sub({1})"]
        return self.act(self.let(self.random.choice(ways).format(n, addend)))

    def promoted(self) -> str:
        n = self.normed("x", self.channels)
        return self.let(
            self.random.choice(["F.relu({0} + wide(x)).to(x.dtype)", "F.relu(wide({0}) + x).to(x.dtype)"]).format(n)
        )

    def shared(self) -> str:
        """A norm that is called twice in a step."""
        norm = self.layer(self.norm_layer())
        a, b = self.let(f"{norm}(x)"), self.let(f"{norm}(x * 2 + 1)")
        ways = [f"F.relu({a} + {b})", f"F.relu({a}) + F.silu({b})", f"F.relu({norm}(F.relu({a})))"]
        return self.let(self.random.choice(ways))

    def scaled_branch(self) -> str:
        """ConvNeXt's block."""
        channels, dims = self.channels, self.dims
        y = self.let(f"{self.layer(self.conv(kind='depthwise'))}(x)")
        y = self.norm(y)
        y = self.let(f"F.gelu({self.layer(self.conv(2 * channels, '1'))}({y}))")
        y = self.let(f"{self.layer(self.conv(channels, '1'))}({y})")
        gamma = self.layer(f"nn.Parameter(torch.rand(1, {channels}{', 1' * dims}))")
        return self.let(self.random.choice([f"x + {gamma} * {y}", f"{y}.mul({gamma}) + x", f"x + {y}.mul_({gamma})"]))

    def pooled(self) -> str:
        n = self.normed("x") if self.maybe(0.5) else self.act(self.normed("x"))
        pool = self.random.choice(["max", "avg"])
        self.extent = tuple(-(-size // 2) for size in self.extent)
        return self.let(f"F.{pool}_pool{self.dims}d({n}, 2, 2, ceil_mode=True)")

    def strided(self) -> str:
        channels = random_channels(self.random)
        conv = f"nn.Conv{self.dims}d({self.channels}, {channels}, 3, 2, 1)"
        self.channels, self.extent = channels, tuple(-(-size // 2) for size in self.extent)
        return self.act(self.norm(self.let(f"{self.layer(conv)}(x)")))

    def upsampled(self) -> str:
        if math.prod(self.extent) > 100:
            return self.usual()
        n = self.normed("x")
        n = n if self.maybe(0.5) else self.act(n)
        self.extent = tuple(2 * size for size in self.extent)
        return self.let(f"F.interpolate({n}, scale_factor=2)")

    def grouped(self) -> str:
        """A convolution of groups of channels, with a larger filter, dilated or with a stride."""
        groups = self.random.choice([count for count in range(1, self.channels + 1) if self.channels % count == 0])
        channels, size = groups * self.random.randint(1, max(1, 32 // groups)), self.random.choice([2, 3, 5])
        stride, dilation = self.random.choice([(1, 1), (1, 2), (2, 1)])
        padding, reach = dilation * (size // 2), dilation * (size - 1)
        settings = self.channels, channels, size, stride, padding, dilation, groups
        self.channels, self.extent = channels, tuple((n + 2 * padding - reach - 1) // stride + 1 for n in self.extent)
        return self.act(self.norm(self.let(f"{self.layer(f'nn.Conv{self.dims}d{settings}')}(x)")))

    def skipped(self) -> str:
        """A level of a U-Net: what is before the pooling is concatenated with what is computed behind it."""
        before = self.act(self.normed("x"))
        channels = self.channels
        pooled = self.let(f"F.max_pool{self.dims}d({before}, 2, ceil_mode=True)")
        inside = self.act(self.normed(pooled, random_channels(self.random)))
        above = self.let(f"F.interpolate({inside}, size={before}.shape[2:])")
        self.channels += channels
        return self.let(f"torch.cat([{before}, {above}], 1)")

    def each_sample(self) -> str:
        """Instance norm of inputs without a batch."""
        norm = self.layer(f"nn.InstanceNorm{self.dims}d({self.channels}, affine={self.maybe(0.5)})")
        return self.let(f"torch.stack([F.relu({norm}(one)) for one in x])")

    def whole_samples(self) -> str:
        sizes = [self.channels, *self.extent]
        return self.act(self.let(f"{self.layer(f'nn.LayerNorm({sizes[self.random.randint(0, 1) :]})')}(x)"))

    def write(self, kind: str) -> Written:
        self.do(f"return {getattr(self, kind)()}")
        return Written(self.layers, self.lines)


KINDS: dict[str, int] = {
    **{"usual": 8, "residual": 10, "preactivated": 4, "alone": 2, "twice": 2, "three_branches": 2, "used_twice": 3},
    **{"written_then_used": 2, "other_names": 3, "views": 3, "dense": 2, "concatenated_norms": 1, "squeeze_excite": 3},
    **{"own_function": 2, "without_gradients": 3, "control": 3, "observed": 4, "changed_addend": 2, "broadcast": 4},
    **{"promoted": 2, "shared": 2, "scaled_branch": 2, "pooled": 2, "strided": 2, "upsampled": 1, "each_sample": 1},
    "whole_samples": 1,
}


def random_channels(random: Random) -> int:
    return random.choice([1, 2, 3, 4, 4, 6, 8, 8, 12, 16, 16, 17, 24, 32])


def random_kinds(random: Random, shares: Mapping[str, int] = KINDS) -> tuple[tuple[str, int], ...]:
    """Return the kinds of a network's blocks, each with its seed."""
    kinds = random.choices([*shares], [*shares.values()], k=random.choice([1, 2, 2, 3, 3, 4]))
    return tuple((kind, random.randrange(2**32)) for kind in kinds)


def network(
    kinds: Sequence[tuple[str, int]],
    channels: int,
    extent: tuple[int, ...],
    *,
    end: str,
    checkpoints: Sequence[bool | None],
) -> Written:
    """Return a network of an input of 3 channels.

    end: what the network returns: "features", "scores" of a head with norms of features, a "pair", a "dict", or a
        "norm", which nothing follows.
    checkpoints: for each block whether its checkpoint is reentrant; None for no checkpoint.
    """
    blocks: dict[str, str | nn.Module] = {"stem": f"nn.Conv{len(extent)}d(3, {channels}, 3, padding=1)"}
    lines = ["x = self.stem(x)"]
    for index, ((kind, seed), is_reentrant) in enumerate(zip(kinds, checkpoints, strict=True)):
        writer = Writer(Random(seed), channels, extent, is_recomputed=is_reentrant is not None)
        blocks[f"{kind}{index}"] = writer.write(kind)
        channels, extent = writer.channels, writer.extent
        call = f"self.{kind}{index}"
        lines.append(f"x = {call}(x)" if is_reentrant is None else f"x = checkpointed({call}, x, {is_reentrant})")
    if end == "scores":
        blocks["fc"], blocks["norm"] = f"nn.Linear({channels}, 7)", "nn.BatchNorm1d(7)"
        lines.append("return F.relu(self.norm(self.fc(x.flatten(2).mean(2))))")
    elif end == "features":
        lines.append("return x")
    else:
        blocks["norm"] = f"nn.BatchNorm{len(extent)}d({channels})"
        lines.append("n = self.norm(x)")
        lines.append({"norm": "return n", "pair": "return n, F.relu(n)", "dict": "return {'n': n, 'y': n + x}"}[end])
    return Written(blocks, lines)


def initialize(model: nn.Module, seed: int) -> None:
    """Draw all weights and running statistics; some channels of norms have a weight of 0 and a bias on a kink."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.rand, generator=generator)
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                fan = max(1, weight[0].numel()) if weight.dim() > 1 else 1
                weight.copy_((draw(weight.shape) * 2 - 1) * (3 / fan) ** 0.5)
                if weight.dim() == 1 and name in ("weight", "gamma"):
                    weight.abs_().add_(0.3)
            for name, statistic in module.named_buffers(recurse=False):
                if statistic.is_floating_point():
                    statistic.copy_(draw(statistic.shape) + (0.5 if name == "running_var" else -0.5))
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            is_norm = isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(bias, Tensor)
            if is_norm and draw(()).item() < 0.5:
                kinks = torch.tensor([0.0, 0.0, 6.0, 3.0, -3.0, 1.0])[torch.randint(6, bias.shape, generator=generator)]
                fixed = draw(bias.shape) < 0.4
                weight[fixed], bias[fixed] = 0.0, kinks.to(bias.dtype)[fixed]
