"""Layer tables: every convolution of a source, as torch computes it, and bad sources refused by line and name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.bench.sources.layers import Layer, load_source
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.running import problems
from mucudnn.tuning.trace import trace

HEADING = "c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w"


def forward(*sizes: Any, **choices: Any) -> ConvProblem:
    return ConvProblem(Operation.FORWARD, *sizes, **choices)


# Tracing


def convolutions_of(model: nn.Module, sample_input: Any) -> list[tuple[str, ConvProblem, int]]:
    """Module name, problem and batch size of every call."""
    return [(call.name, call.problem, call.batch_size) for call in trace(model, sample_input)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_traced_problem_is_what_torch_computes() -> None:
    for options, expected in (
        ({"padding": (2, 1), "stride": 2}, forward(4, 9, 8, 6, 3, 2, (2, 2), (2, 1))),
        ({"dilation": (2, 3), "groups": 2}, forward(4, 9, 8, 6, 3, 2, dilation=(2, 3), groups=2)),
        ({"padding": "valid"}, forward(4, 9, 8, 6, 3, 2)),
        # 3 rows: one on each side; 2 columns: one on the right, which torch adds beforehand
        ({"padding": "same"}, forward(4, 9, 9, 6, 3, 2, padding=(1, 0))),
        ({"padding": (2, 1), "padding_mode": "circular"}, forward(4, 13, 10, 6, 3, 2)),
        ({"padding": "same", "padding_mode": "reflect"}, forward(4, 11, 9, 6, 3, 2)),
    ):
        model = nn.Conv2d(4, 6, (3, 2), **options)
        x = torch.randn(5, 4, 9, 8)
        assert convolutions_of(model, x) == [("", expected, 5)]
        assert expected.y_shape(5) == model(x).shape


def test_every_call_of_every_convolution_in_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(nn.Conv2d(3, 3, 3))
            self.unused = nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.outer[0](input=self.outer(x)[:2] * scale)  # type: ignore[no-any-return]

    found = convolutions_of(Twice(), (torch.randn(4, 3, 9, 9), torch.ones(1)))
    assert found == [("outer.0", forward(3, 9, 9, 3, 3, 3), 4), ("outer.0", forward(3, 7, 7, 3, 3, 3), 2)]


def test_memory_format_is_torchs_where_tensors_are_both() -> None:
    """What counts is what the operators look up when the model runs."""
    for c, size, r in ((4, 1, 1), (4, 3, 1), (1, 3, 3), (4, 3, 3), (1, 1, 1)):
        for x_turned in (False, True):
            for w_turned in (False, True):
                model = nn.Conv2d(c, 4, r, padding=r // 2)
                shapes = {name: (n, c, edge, edge) for name, n, edge in (("x", 2, size), ("w", 4, r))}
                turned = {
                    name: torch.empty_strided(s, (s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]))
                    for name, s in shapes.items()
                }
                if w_turned:
                    model.weight = nn.Parameter(turned["w"])
                x = turned["x"] if x_turned else torch.empty(shapes["x"])
                expected = problems.torchs_memory_format(x, model.weight, ((1, 1), (r // 2, r // 2), (1, 1), 1))
                assert trace(model, x)[0].problem.memory_format is expected


def test_what_no_problem_describes_is_left_out() -> None:
    with pytest.raises(InvalidInputError, match="sample_input has 0 images"):
        convolutions_of(nn.Conv2d(3, 3, 3), torch.randn(0, 3, 9, 9))
    assert convolutions_of(nn.Conv2d(1, 1, 1, device="meta"), torch.empty(2**20 + 1, 1, 1, 1, device="meta")) == []
    assert convolutions_of(nn.Conv2d(3, 3, 3, dtype=torch.complex64), torch.randn(1, 3, 9, 9).to(torch.complex64)) == []


# Networks and built-in tables


def test_networks_count_every_convolution() -> None:
    for name, calls in (
        ("alexnet", 5),
        ("vgg16", 13),
        ("squeezenet", 26),
        ("resnet18", 20),
        ("resnet50", 53),
        ("mobilenetv2", 52),
        ("densenet40", 39),
    ):
        assert sum(layer.count for layer in load_source(name).layers) == calls


def test_only_the_first_layer_has_no_backward_data() -> None:
    table = load_source("vgg16")
    without = [layer for layer in table.layers if not layer.input_needs_gradient]
    assert without == [table.layers[0]]
    pairs = table.problems(Operation)
    assert len(pairs) == 3 * len(table.layers) - 1
    assert (table.layers[0], table.layers[0].problem.with_operation(Operation.BACKWARD_DATA)) not in pairs
    assert all(problem.with_operation(Operation.FORWARD) == layer.problem for layer, problem in pairs)


def test_a_scaled_table_is_named_and_merged_by_its_own_batch_sizes() -> None:
    whole, scaled = load_source("deepbench-train").layers, load_source("deepbench-train", batch_scale=0.1).layers
    assert sum(layer.count for layer in scaled) == sum(layer.count for layer in whole)
    assert {layer.batch_size for layer in scaled} == {max(1, round(0.1 * layer.batch_size)) for layer in whole}
    suffixes = [(layer.name.rpartition(" n"), layer.batch_size) for layer in scaled if " n" in layer.name]
    assert suffixes
    assert all(int(number) == batch_size for (_, _, number), batch_size in suffixes)
    with pytest.raises(InvalidInputError, match="at most"):
        load_source("deepbench-train", batch_scale=1e308)


def test_deepbench_tables_keep_their_batch_sizes() -> None:
    for name, lines, batch_sizes in (
        ("train", 94, {4, 8, 16, 32}),
        ("inference-server", 107, {1, 2, 4}),
        ("inference-device", 17, {1}),
    ):
        layers = load_source(f"deepbench-{name}").layers
        assert sum(layer.count for layer in layers) == lines
        assert {layer.batch_size for layer in layers} == batch_sizes


# CSV files


def load_csv(tmp_path: Path, text: str, **choices: Any) -> tuple[Layer, ...]:
    path = tmp_path / "layers.csv"
    path.write_text(text)
    return load_source(str(path), **choices).layers


def test_csv_file(tmp_path: Path) -> None:
    text = (
        "name,n,groups,dilation,count,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\nfirst,4,2,3,5,6,31,32,8,3,2,1,2,2,1\n"
    )
    expected = forward(6, 31, 32, 8, 3, 2, (2, 1), (1, 2), (3, 3), 2)
    assert load_csv(tmp_path, text) == (Layer("first", expected, 4, 5),)


def test_equal_lines_are_merged_and_lines_without_a_name_called_by_their_sizes(tmp_path: Path) -> None:
    line = "3,9,9,4,3,3,0,0,1,1"
    layers = load_csv(tmp_path, f"{HEADING}\n{line}\n3,9,9,5,3,3,0,0,1,1\n\n{line}\n", batch=2)
    assert [(layer.name, layer.problem.k, layer.count, layer.batch_size) for layer in layers] == [
        ("3x9x9 k4 3x3", 4, 2, 2),
        ("3x9x9 k5 3x3", 5, 1, 2),
    ]
    (layer,) = load_csv(tmp_path, f"dilation,groups,{HEADING}\n2,3,3,9,9,6,3,2,1,1,2,1\n")
    assert layer.name == "3x9x9 k6 3x2/2x1 pad 1 dilation 2 groups 3"
    first, second = load_csv(tmp_path, f"n,{HEADING}\n4,{line}\n8,{line}\n")
    assert (first.name, second.name) == ("3x9x9 k4 3x3 n4", "3x9x9 k4 3x3 n8")


# The user's own models


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module in the working folder, which is not on the path."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def twins(): return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))\n"
        "def frames(): return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Flatten(0, 1), nn.Conv2d(2, 3, 1))\n"
        "def fails(): raise KeyError('no weights')\n"
        "def leaves(): raise SystemExit(3)\n"
        "def text(): return 'model'\n"
        "flat = nn.Flatten()\n"
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_own_model_first_layer_is_kept_apart(own_model: str) -> None:
    layers = load_source(f"{own_model}:twins", input_shape=(3, 8, 9), batch=4).layers
    assert [(layer.name, layer.count, layer.input_needs_gradient) for layer in layers] == [
        ("0", 1, False),
        ("1, 2", 2, True),
    ]
    assert {(layer.problem, layer.batch_size) for layer in layers} == {(forward(3, 8, 9, 3, 1, 1), 4)}


# Options and names
