"""Models of which a part is of an unusual kind are tuned, or run as they were for a reason that is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.problems.tuned_by_hand import tune_by_hand
from torch import Tensor, nn
from torch.ao import quantization
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

import mucudnn

X = torch.randn(2, 3, 8, 8)


def layers(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *parts, nn.Conv2d(4, 4, 3, padding=1))


class Holding(nn.Module):
    """Has a buffer, or an attribute."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.layers = layers()
        if isinstance(value, Tensor):
            self.register_buffer("value", value)
        else:
            self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Growing(Holding):
    """Writes into a sparse buffer, and resizes another, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__(torch.eye(3).to_sparse())
        self.register_buffer("seen", torch.zeros(1))

    @torch.no_grad()
    def count(self) -> None:
        self.seen.resize_(self.seen.numel() + 1).fill_(1)  # type: ignore[operator, union-attr]
        self.value.mul_(2)  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return super().forward(x)


class Guarded(Tensor):
    """Lets nobody copy it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("clone", "copy_", "equal", "is_inference"):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Frozen(nn.Module):
    """Refuses attributes once it is made."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        vars(self)["is_made"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "is_made" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


class FrozenModel(Frozen, Holding):
    pass


class FrozenConvolution(Frozen, nn.Conv2d):
    pass


class WithChoices(nn.Conv2d):
    """Has an attribute that tuned modules have, too."""

    choices = ("left", "right")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.choices)


class Curious(nn.Conv2d):
    def __getattribute__(self, name: str) -> Any:
        if name == "tuned":
            raise RuntimeError("nobody may ask")
        return super().__getattribute__(name)


class Unshowable:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nobody may look")


def scripted(*parts: nn.Module) -> Any:
    return torch.jit.script(nn.Sequential(*parts))


def trained_for_quantization() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return cast(nn.Module, quantization.prepare_qat(quantization.fuse_modules_qat(model, [["0", "1"]])))


def distributed(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return cast(
        nn.Module,
        distribute_module(
            model,
            mesh,
            input_fn=lambda _, given, mesh: tuple(DTensor.from_local(one, mesh, [Replicate()]) for one in given),
            output_fn=lambda _, y, mesh: y.to_local(),
        ),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sparse buffer": lambda: Holding(torch.eye(3).to_sparse()),
    "mkldnn buffer": lambda: Holding(torch.ones(1, 3, 4, 4).to_mkldnn()),
    "nested buffer": lambda: Holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    "meta buffer": lambda: Holding(torch.empty(3, device="meta")),
    "buffer of bits": lambda: Holding(torch.zeros(4, dtype=torch.uint8).view(torch.bits8)),
    "buffer that raises": lambda: Holding(torch.ones(3).as_subclass(Guarded)),
    "DTensor buffer": lambda: Holding(distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])),
    "buffers that grow": Growing,
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()),
    "lazy and never called": lambda: Holding(nn.LazyBatchNorm2d()),
    "frozen part": lambda: layers(torch.jit.freeze(scripted(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval())),
    "scripted part": lambda: layers(scripted(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))),
    "frozen": lambda: torch.jit.freeze(scripted(nn.Conv2d(3, 4, 1)).eval()),
    "trained for quantization": trained_for_quantization,
    "DTensor": lambda: distributed(layers()),
    "refuses attributes": lambda: FrozenModel(None),
    "convolution that refuses attributes": lambda: layers(FrozenConvolution(4, 4, 1)),
    "has our attributes": lambda: layers(WithChoices(4, 4, 1)),
    "raises when asked": lambda: layers(Curious(4, 4, 1)),
    "raises when looked at": lambda: Holding(Unshowable()),
    "meta": lambda: layers().to("meta"),
}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


SETTINGS: dict[str, dict[str, Any]] = {
    "confirm": {"confirm": True},
    "headroom": {"workspace_limit": "headroom"},
    "memory_budget": {"memory_budget": "16MiB"},
}


def state(model: nn.Module) -> dict[str, Any]:
    """Return the values of a model's tensors, as far as they can be compared."""
    dense = {
        name: tensor.detach().to_dense()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout in (torch.strided, torch.sparse_coo)
    }
    return {name: t.tolist() for name, t in dense.items() if t.is_floating_point() and not t.is_meta}


def seeded(make: Callable[[], nn.Module], *, inference: bool) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for module in model.modules() if inference else ():
        vars(module)["training"] = False  # some refuse ``eval()``
    return model


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_each_runs_as_before(setting: str, database: Path) -> None:
    given = {"time_limit": "1ms", "algorithms": "direct", "operations": "forward", "database": database}
    config = mucudnn.Config(**given, **SETTINGS[setting])
    for name, make in MODELS.items():
        if (setting, name) == ("headroom", "meta buffer"):
            continue  # of a model on one device alone, and it is said
        x = X.to("meta") if name == "meta" else X
        model, twin = (seeded(make, inference=setting == "memory_budget") for _ in range(2))
        before = None if name == "lazy" else state(model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ours = mucudnn.optimize(model, x, config, progress=False)
        is_told = any("the model runs as it is" in str(one.message) for one in told)
        assert is_told is (ours is model and (setting == "memory_budget" or name == "meta")), name
        assert before in (None, state(model)), name
        assert mucudnn.report(ours).details(), name
        if name not in ("lazy", "meta"):  # of random weights, and without values
            torch.testing.assert_close(ours(x), twin(x), rtol=1e-4, atol=1e-4, msg=name)


def test_reports_say_why_a_convolution_is_left_alone(database: Path) -> None:
    config = mucudnn.Config(time_limit="1ms", algorithms="direct", operations="forward", database=database)
    reasons = {
        "DTensor": "its parameters are DTensor",
        "has our attributes": "WithChoices has an attribute 'choices' of its own",
        "raises when asked": "Curious cannot be changed: nobody may ask",
    }
    for name, reason in reasons.items():
        assert reason in str(mucudnn.report(mucudnn.optimize(MODELS[name](), X, config)))


def test_a_model_that_is_distributed_once_it_is_tuned(database: Path) -> None:
    model = layers()
    expected = model(X)
    model = distributed(tune_by_hand(model, X))
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(X), expected)
