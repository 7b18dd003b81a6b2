"""The benchmark of training steps: every cell is there, told and written; on a tiny model."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.ticking import TickingClock
from support.command_line import fail, invoke
from support.in_threads import InThreads, train_in_threads
from support.snapshots import assert_as_stored
from support.training_steps import CONFIG, FLOAT32, SETTING, measured_variants, tiny
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.contests.torch_variants import OwnThread
from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.sources import trainable
from mucudnn.bench.sources.trainee import Trainee
from mucudnn.bench.suites.training import benchmark as training_benchmark
from mucudnn.bench.suites.training import several, step_job
from mucudnn.bench.suites.training.benchmark import TrainingOptions
from mucudnn.bench.suites.training.report import (
    training_rows,
    training_split_table,
    training_steps_table,
    training_summary,
    training_tables,
)
from mucudnn.bench.suites.training.result import How, Precision, Setting, StepCost, VariantResult
from mucudnn.bench.suites.training.several import measure_sources
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.torch_settings import searching

QUICK = ("--algorithms", "gemm", "--time-limit", "10ms", "--rounds", "2", "--batch", "2", "--threads", "1")
SOME = ("--variants", "mucudnn")


def test_every_variant_is_measured_in_every_precision_and_format() -> None:
    cells = measured_variants()
    assert [(c.setting.precision, c.setting.memory_format, c.variant) for c in cells] == [
        (precision, memory_format, variant)
        for precision in (Precision.FLOAT32, Precision.BFLOAT16)
        for memory_format in MemoryFormat
        for variant in (Variant.TORCH, Variant.MUCUDNN)
    ]
    for cell in cells:
        assert cell.cost is not None
        assert (cell.cost.time_s, cell.cost.noise, cell.failure) == (1.0, 0.0, "")


def test_the_model_is_left_as_it_is() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured_variants(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model[0]) is nn.Conv2d


def test_peak_memory_is_that_of_a_step() -> None:
    """The output of the convolution, and at least once more its gradient; of bfloat16 half as much and the casts."""
    one, two = (measured_variants(memory_formats=[MemoryFormat.CONTIGUOUS], model=wide(n))[0].cost for n in (64, 128))
    assert one is not None
    assert two is not None
    added = 64 * 2 * 4 * 4 * 4  # bytes of 64 more channels of the output, N=2, 4x4, float32
    assert 2 * added <= two.peak_bytes - one.peak_bytes <= 8 * added


def test_a_step_begins_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last one would be freed in it, and hide as many bytes of its peak on CUDA."""
    learn, gradients = Trainee.learn, list[Tensor | None]()

    def watched(self: Trainee, *given: Any) -> Tensor:
        gradients.extend(parameter.grad for parameter in self.model.parameters())
        return learn(self, *given)

    monkeypatch.setattr(Trainee, "learn", watched)
    measured_variants(memory_formats=[MemoryFormat.CONTIGUOUS])
    assert gradients
    assert set(gradients) == {None}


def wide(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Seen(nn.Module):
    """Remembers what comes out of it in training, and who asks."""

    def __init__(self, seen: list[tuple[torch.dtype, bool, str]]) -> None:
        super().__init__()
        self.seen = seen

    def __deepcopy__(self, memo: object) -> Seen:
        return Seen(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        self.seen.append((x.dtype, channels_last, threading.current_thread().name))
        return x


def test_steps_are_in_the_precision_and_format_and_in_threads_of_their_own() -> None:
    seen: list[tuple[torch.dtype, bool, str]] = []
    network = tiny()
    network.insert(1, Seen(seen))
    measured_variants(network)
    assert {step[:2] for step in seen} == {
        (dtype, channels_last) for dtype in (torch.float32, torch.bfloat16) for channels_last in (False, True)
    }
    places = {step[2] for step in seen if step[:2] == (torch.float32, False)}
    assert len(places) == 2
    assert threading.main_thread().name not in places


def test_what_is_over_time_is_told() -> None:
    cells = measured_variants(options=TrainingOptions(CONFIG, rounds=1, seconds=0.0, clock=TickingClock()))
    assert len(cells) == 8
    assert {(c.cost, c.failure) for c in cells} == {(None, "not begun: the 0 s were over")}


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_variant_that_fails_has_its_reason_and_the_others_go_on(
    steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, count = Trainee.learn, [0]

    def failing(self: Trainee, *given: Any) -> Tensor:
        if isinstance(self.model[0], mucudnn.Conv2d):
            count[0] += 1
            if count[0] > steps_before:
                raise RuntimeError("CUDA out of memory.\nand a stack trace")
        return learn(self, *given)

    monkeypatch.setattr(Trainee, "learn", failing)
    torchs, ours = measured_variants(memory_formats=[MemoryFormat.CONTIGUOUS], precisions=[Precision.FLOAT32])
    assert torchs.cost is not None
    assert (ours.cost, ours.failure) == (None, "CUDA out of memory.")


def test_an_unknown_precision_says_what_there_is() -> None:
    with pytest.raises(InvalidInputError, match="precision is tf32; device 'cpu' has float32, bfloat16"):
        measured_variants(precisions=[Precision.TF32])


# What is set on CUDA: torch has the switches without a GPU, too


def tf32() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(Precision.TF32, (True, True)), (Precision.FLOAT32, (False, False)), (Precision.BFLOAT16, (True, False))],
)
def test_tf32_is_allowed_where_it_is_asked_for(precision: Precision, expected: tuple[bool, bool]) -> None:
    with step_job._rounding(replace(SETTING, device="cuda", precision=precision)):
        assert tf32() == expected
        assert torch.backends.cudnn.conv.fp32_precision == ("tf32" if expected[0] else "none")
    assert tf32() == (True, False)


@pytest.mark.parametrize(
    "context",
    [
        lambda: step_job._rounding(replace(SETTING, device="cuda")),
        lambda: searching(True),
    ],
)
def test_switches_are_set_back_after_errors(context: Callable[[], Any]) -> None:
    with pytest.raises(KeyError), context():
        raise KeyError
    assert (*tf32(), torch.backends.cudnn.benchmark) == (True, False, False)


def test_only_one_variant_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    of_thread: dict[int, set[bool]] = {}
    every = (Variant.TORCH, Variant.TORCH_BENCHMARK, Variant.MUCUDNN)
    monkeypatch.setattr("mucudnn.bench.contests.variants.VARIANTS", {"cpu": every})

    class Searching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                of_thread.setdefault(threading.get_ident(), set()).add(torch.backends.cudnn.benchmark)
            return x

    network = tiny()
    network.insert(1, Searching())
    options = TrainingOptions(CONFIG, rounds=2, clock=TickingClock(), variants=every)
    measured_variants(network, options, **FLOAT32)
    assert sorted(map(sorted, of_thread.values())) == [[False], [False], [True]]


def test_a_thread_of_its_own_runs_everything_and_ends() -> None:
    with OwnThread() as thread:
        first, second = (thread.call(threading.current_thread) for _ in range(2))
        assert first is second
        assert first is not threading.current_thread()
        with pytest.raises(KeyError):
            thread.call({}.__getitem__, 1)
    assert not first.is_alive()


# Several networks


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_threads(monkeypatch)
    monkeypatch.setattr(trainable, "build", lambda name: tiny())
    monkeypatch.setattr(several, "input_shape_of", lambda name: (3, 6, 6))


@pytest.mark.usefixtures("two_networks")
def test_networks_are_measured_one_after_the_other_each_with_its_batch() -> None:
    told: list[tuple[str, float]] = []
    options = TrainingOptions(
        CONFIG,
        rounds=1,
        clock=TickingClock(),
        progress=lambda text, fraction: told.append((text, fraction)),
        variants=(Variant.MUCUDNN,),
        apart=InThreads,
    )
    groups = measure_sources(["alexnet", "vgg16", "alexnet"], [2, 3, 2], options=options, **FLOAT32)
    settings = [(cell.setting.network, cell.setting.batch_size) for group in groups for cell in group]
    assert settings == [("alexnet", 2)] * 2 + [("vgg16", 3)] * 2
    assert [fraction for text, fraction in told if text.endswith("contiguous")] == [0.0, 0.5]


@pytest.mark.usefixtures("two_networks")
def test_the_time_is_that_of_all_networks() -> None:
    options = TrainingOptions(CONFIG, rounds=1, seconds=0.0, variants=(Variant.MUCUDNN,))
    cells = [cell for group in measure_sources(["alexnet", "vgg16"], [2, 2], options=options) for cell in group]
    assert len(cells) == 16
    assert {cell.failure for cell in cells} == {"not begun: the 0 s were over"}


def test_names_and_batches_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(InvalidInputError, match="did you mean vgg16"):
        measure_sources(["alexnet", "vgg-16"], [2, 2])
    with pytest.raises(InvalidInputError, match="it must be at most"):
        measure_sources(["alexnet"], [2**40])


def test_a_model_of_the_user_is_trained_in_processes(tmp_path: Path) -> None:
    """It is defined in a file in another folder than this one, which the processes find."""
    (tmp_path / "net_of_a_user.py").write_text(NET)
    source, file = f"{tmp_path / 'net_of_a_user.py'}:net", tmp_path / "out.json"
    only = ("--precisions", "float32", "--memory-format", "contiguous", "--input", "3x6x6", "--json", file)
    result = invoke("bench", "training", source, *QUICK, *SOME, *only)
    assert result.exit_code == 0, result.output
    cells = json.loads(file.read_text())["cells"]
    assert [(c["network"], c["variant"], c["failure"]) for c in cells] == [
        (source, "torch", ""),
        (source, "mucudnn", ""),
    ]
    for cell in cells:
        assert cell["images_per_s"] == pytest.approx(2 / cell["time_s"])
        assert min(cell[f"kind_{kind}_s"] for kind in ("first_layer", "activation", "linear", "rest")) > 0


def test_what_has_no_model_or_cannot_be_trained_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="deepbench-train has no model to run; name one of"):
        measure_sources(["deepbench-train"], [2])
    (tmp_path / "whole_numbers.py").write_text(NET.replace("nn.Linear(4, 10)", "Argmax()"))
    source = f"{tmp_path / 'whole_numbers.py'}:net"
    with pytest.raises(InvalidInputError, match="the model gives nothing that has a gradient"):
        measure_sources([source], [2], input_size=(3, 6, 6))
    with pytest.raises(InvalidInputError, match=r"there is no file .*missing\.py"):
        measure_sources([f"{tmp_path / 'missing.py'}:net"], [2], input_size=(3, 6, 6))
    (tmp_path / "json.py").write_text("")
    with pytest.raises(InvalidInputError, match=r"there is another module json, .*: give the file another name"):
        measure_sources([f"{tmp_path / 'json.py'}:net"], [2], input_size=(3, 6, 6))


def test_a_variant_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="variant is torch-benchmark; device 'cpu' has torch, torch-compile, mu"
    ):
        measured_variants(options=TrainingOptions(CONFIG, variants=(Variant.TORCH_BENCHMARK,)))


NET = """
from torch import nn

class Argmax(nn.Module):
    def forward(self, x):
        return x.argmax(1)

class Net(nn.Sequential):
    pass

def net():
    return Net(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
"""


# Told and written


def cell(variant: Variant, cost: StepCost | None, failure: str = "", setting: Setting = SETTING) -> VariantResult:
    return VariantResult(setting, variant, cost, failure)


def several_cells() -> list[VariantResult]:
    other = replace(SETTING, network="other", batch_size=4)
    return [
        cell(Variant.TORCH, StepCost(0.2, 0.01, 2**21, StepSplit(0.05, 0.1, 0.05))),
        cell(Variant.MUCUDNN, StepCost(0.1, 0.02, 2**20, StepSplit(0.02, 0.04, 0.0525))),
        cell(Variant.TORCH, StepCost(0.3, 0.01, 2**21), setting=other),
        cell(Variant.MUCUDNN, None, "out of memory", setting=other),
    ]


def test_several_networks_are_summed_up() -> None:
    assert_as_stored("bench-training-summary", training_summary(several_cells(), Config()))
    titles = [str(table.title) for table in training_tables(several_cells(), Config())]
    assert titles == [
        "tiny, batch 2: training steps, workspace limit 64 MiB",
        "tiny, batch 2: where the time of a step goes",
        "other, batch 4: training steps, workspace limit 64 MiB",
        "training steps, workspace limit 64 MiB",
    ]
    assert len([*training_tables(several_cells()[:2], Config())]) == 2


def test_the_rest_is_compared_with_torchs() -> None:
    assert_as_stored("bench-training-split", training_split_table(several_cells()[:2]))
    torchs, ours, unsplit, failed = training_rows(several_cells())
    assert (torchs["rest_ratio"], ours["rest_ratio"]) == (1, pytest.approx(1.05))
    assert (ours["forward_convolutions_s"], ours["backward_convolutions_s"], ours["rest_s"]) == (0.02, 0.04, 0.0525)
    assert unsplit["rest_ratio"] is unsplit["rest_s"] is failed["rest_ratio"] is None


def test_the_table_compares_with_torch_of_the_same_setting() -> None:
    cells = [
        cell(Variant.TORCH, StepCost(0.2, 0.01, 2**21)),
        cell(Variant.MUCUDNN, StepCost(0.1, 0.02, 2**20)),
        cell(Variant.TORCH_BENCHMARK, None, "out of memory"),
    ]
    assert_as_stored("bench-training", training_steps_table(cells, Config()))


def test_the_table_names_what_is_enabled() -> None:
    enabled = replace(SETTING, how=How.ENABLE)
    cells = [
        cell(Variant.TORCH, StepCost(0.2, 0.01, 2**21), setting=enabled),
        cell(Variant.MUCUDNN, StepCost(0.1, 0.02, 2**20), setting=enabled),
    ]
    (names,) = (column.cells for column in training_steps_table(cells, Config()).columns[2:3])
    assert [*names] == ["torch", "mucudnn, enabled"]


def test_the_command_writes_every_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_in_threads(monkeypatch)
    monkeypatch.setattr(trainable, "build", lambda name: tiny())
    files = "--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json"
    result = invoke("bench", "training", "alexnet", *QUICK, *SOME, *files, "--precisions", "float32")
    assert result.exit_code == 0, result.output
    assert "alexnet, batch 2: training steps, workspace limit 64 MiB" in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    with (tmp_path / "out.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert {"date", "environment", "config", "mucudnn", "format_version"} <= record.keys()
    assert [(c["precision"], c["memory_format"], c["variant"]) for c in record["cells"]] == [
        ("float32", memory_format, variant)
        for memory_format in ("contiguous", "channels_last")
        for variant in ("torch", "mucudnn")
    ]
    for line, written in zip(lines, record["cells"], strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in written.items()}


def test_the_files_are_there_after_each_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure, done = training_benchmark._measure, list[Setting]()

    def interrupted(setting: Setting, *given: Any) -> tuple[VariantResult, ...]:
        if done:
            raise KeyboardInterrupt
        done.append(setting)
        return measure(setting, *given)

    train_in_threads(monkeypatch)
    monkeypatch.setattr(trainable, "build", lambda name: tiny())
    monkeypatch.setattr(training_benchmark, "_measure", interrupted)
    result = invoke("bench", "training", "alexnet", *QUICK, *SOME, "--csv", tmp_path / "out.csv")
    assert result.exit_code == 130
    assert "alexnet, batch 2: training steps" in result.stdout
    assert "All measurements are kept" in result.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3


def test_the_command_measures_several_networks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_in_threads(monkeypatch)
    monkeypatch.setattr(trainable, "build", lambda name: tiny())
    monkeypatch.setattr(several, "input_shape_of", lambda name: (3, 6, 6))
    asked = (*QUICK, *SOME, "--batch", "2,3", "--precisions", "float32", "--memory-format", "contiguous")
    result = invoke("bench", "training", "alexnet", "vgg16", *asked, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "alexnet, batch 2: training steps" in result.output
    assert "vgg16, batch 3: training steps" in result.output
    assert "their share" in result.output
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [(c["network"], c["batch_size"]) for c in cells] == [("alexnet", 2)] * 2 + [("vgg16", 3)] * 2
    for written in cells:
        parts = (written[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "rest_s"))
        assert all(part > 0 for part in parts)


def test_bad_values() -> None:
    assert "--batch has 2 sizes for 3 sources: give one for all, or one for each" in fail(
        "bench", "training", "alexnet", "vgg16", "resnet18", "--batch", "2,3"
    )
    assert "did you mean alexnet?" in fail("bench", "training", "alexnt")
    assert "device 'cpu' has float32, bfloat16" in fail("bench", "training", "alexnet", "--precisions", "tf32")
    assert "'half' is not known; allowed are tf32, float32, bfloat16" in fail(
        "bench", "training", "alexnet", "--precisions", "half"
    )
