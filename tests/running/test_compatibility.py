"""What of torch works with an optimized model: the table in docs/compatibility.md, row by row."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import ran, tune_by_hand
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn.utils import fusion, parametrizations, prune
from torch.utils.checkpoint import checkpoint

from mucudnn.core.problem import Operation

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        *("`torch.jit", "torch.ao.quantization is deprecated", "Please use quant_min", ".*quantize_per_tensor"),
        *("`isinstance\\(treespec", ".*reduce_range", ".*TypedStorage", "torch.quantization"),
    )
]  # of torch, about what it is going to drop

Use = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.relu(self.norm(self.first(x))))
        return y


def through_a_file(save: Callable[[Any, Any], object], load: Callable[[Any], Any], saved: Any) -> Any:
    file = io.BytesIO()
    save(saved, file)
    file.seek(0)
    return load(file)


def fused_by_fx(model: nn.Module, x: Tensor) -> Tensor:
    from torch.fx.experimental.optimization import fuse  # here: it warns when it is imported

    return cast(Tensor, fuse(model)(x))


def traced(model: nn.Module, x: Tensor) -> Tensor:
    loaded = through_a_file(torch.jit.save, torch.jit.load, torch.jit.trace(model, x))  # type: ignore[no-untyped-call]
    return cast(Tensor, loaded(x))


def exported(model: nn.Module, x: Tensor) -> Tensor:
    program = torch.export.export(model, (x,)).run_decompositions()
    return cast(Tensor, through_a_file(torch.export.save, torch.export.load, program).module()(x))


def saved(model: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, through_a_file(torch.save, partial(torch.load, weights_only=False), model)(x))


def normalised(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Net)
    parametrizations.weight_norm(model.first)
    parametrizations.spectral_norm(model.last, n_power_iterations=40)
    return cast(Tensor, model.eval()(x))


def pruned(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Net)
    prune.l1_unstructured(model.first, "weight", 0.5)
    return cast(Tensor, model(x))


def folded(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Net)
    return cast(Tensor, model.last(model.relu(fusion.fuse_conv_bn_eval(model.first, model.norm)(x))))


def averaged(model: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, torch.optim.swa_utils.AveragedModel(model)(x))


def with_parameters_handed_in(model: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, torch.func.functional_call(model, dict(model.named_parameters()), (x,)))


def nets() -> tuple[Net, Net, Tensor]:
    """Torch's, ours and what both are given. Their statistics are not those of a fresh normalization."""
    torchs, x = Net(), torch.randn(2, 3, 9, 9)
    torchs(torch.randn(8, 3, 9, 9))
    torchs.eval()
    return torchs, tune_by_hand(copy.deepcopy(torchs), x), x


@pytest.mark.parametrize(
    "use",
    [
        traced,
        saved,
        normalised,
        pruned,
        folded,
        averaged,
        with_parameters_handed_in,
        lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x),
        lambda model, x: copy.deepcopy(model)(x),
        lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
        lambda model, x: nn.DataParallel(model)(x),
        lambda model, x: model.share_memory()(x),
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: quantization.quantize_dynamic(model, {nn.Linear})(x),
    ],
)
def test_what_runs_the_tuned_configurations(use: Use) -> None:
    torchs, ours, x = nets()
    torch.manual_seed(1)
    computed = use(ours, x)
    torch.manual_seed(1)
    torch.testing.assert_close(computed, use(torchs, x), rtol=1e-3, atol=1e-4)
    assert ran(ours) == {Operation.FORWARD}


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_torchs_convolutions_for_any_batch(strict: bool) -> None:
    torchs, ours, x = nets()
    dynamic = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(ours, (x,), dynamic_shapes=dynamic, strict=strict)
    assert [str(node.target) for node in program.graph.nodes].count("aten.conv2d.default") == 2
    for batch in (torch.randn(len(x) + 3, *x.shape[1:]), x[:-1], x):
        torch.testing.assert_close(program.module()(batch), torchs(batch), rtol=1e-3, atol=1e-4)


def quantized_by_fx(model: nn.Module, x: Tensor) -> Tensor:
    prepared = prepare_fx(model, quantization.get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return runs_quantized(convert_fx(prepared), x)


def runs_quantized(model: nn.Module, x: Tensor) -> Tensor:
    assert any("quantized" in type(module).__module__ for module in model.modules())
    return cast(Tensor, model(x))


def test_what_runs_torchs_convolution() -> None:
    for use, tolerance in (
        (lambda m, x: torch.fx.symbolic_trace(m)(x), 1e-4),
        (fused_by_fx, 1e-4),
        (exported, 1e-4),
        (quantized_by_fx, 0.1),
    ):
        torchs, ours, x = nets()
        torch.testing.assert_close(use(ours, x), use(torchs, x), rtol=1e-4, atol=tolerance)  # 0.1: some quanta
        assert ran(ours) == set()


@pytest.mark.parametrize("kind", ["jit", pytest.param("export", marks=pytest.mark.slow)])
def test_what_another_process_loads_runs_torchs_own(tmp_path: Path, kind: str) -> None:
    """Once it has the operators: the choices are not in the file."""
    torchs, ours, x = nets()
    if kind == "jit":
        torch.jit.save(torch.jit.trace(ours, x), tmp_path / "model")  # type: ignore[no-untyped-call]
    else:
        torch.export.save(torch.export.export(ours, (x,)), tmp_path / "model.pt2")
    torch.save((x, torchs(x).detach()), tmp_path / "expected")
    load = "torch.jit.load('model')" if kind == "jit" else "torch.export.load('model.pt2').module()"
    program = f"""
import torch, mucudnn.running.operators
x, expected = torch.load("expected")
torch.testing.assert_close({load}(x), expected, rtol=1e-4, atol=1e-4)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
