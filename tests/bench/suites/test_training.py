"""The benchmark of training steps: every cell is there, split, told and written; on a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.machine import ENVIRONMENT, Slow, TickingClock
from support.command_line import invoke
from support.in_threads import in_threads
from support.snapshots import assert_as_stored
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.reading import Header, read_folder
from mucudnn.bench.results.variants import How, Precision, Variant
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources import models, networks
from mucudnn.bench.sources.trainee import Trainee, labelled_batches
from mucudnn.bench.suites import training
from mucudnn.bench.suites.shared.apart import Entrant
from mucudnn.bench.suites.shared.step_costs import StepTimes
from mucudnn.bench.suites.training import (
    COLUMNS,
    Setting,
    TrainingOptions,
    benchmark_training,
    measured_rows,
    training_tables,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.torch_settings import searching
from mucudnn.running import dispatcher

CONFIG = Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",))
FLOAT32: dict[str, Any] = {"precisions": [Precision.FLOAT32], "memory_formats": [MemoryFormat.CONTIGUOUS]}
SETTING = Setting("tiny", 2, "cpu", Precision.FLOAT32, MemoryFormat.CONTIGUOUS)


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def measured_variants(
    model: nn.Module | None = None,
    options: TrainingOptions | None = None,
    precisions: Sequence[Precision] = (Precision.FLOAT32, Precision.BFLOAT16),
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
) -> list[Row]:
    options = options or TrainingOptions(CONFIG, rounds=2, clock=TickingClock())
    options = replace(options, variants=options.variants or (Variant.TORCH, Variant.MUCUDNN))
    (batch,) = labelled_batches(1, 2, (3, 6, 6))
    subject = (model or tiny(), batch, F.cross_entropy)
    settings = [[Setting("tiny", 2, "cpu", one, name, options.how) for name in memory_formats] for one in precisions]
    with in_threads(training):
        return [row for formats in settings for row in measured_rows(formats, subject, options)]


QUICK = ("--time-limit", "10ms", "--rounds", "2", "--batch", "2", "--threads", "1")
SOME = ("--variants", "mucudnn")


@pytest.fixture(autouse=True)
def few_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_ALGORITHMS", "gemm")


def test_every_variant_is_measured_in_every_precision_and_format_and_the_model_is_left_as_it_is() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cells = measured_variants(model)
    assert [(c.subject["precision"], c.subject["memory_format"], c.contestant) for c in cells] == [
        (precision, memory_format, variant)
        for precision in (Precision.FLOAT32, Precision.BFLOAT16)
        for memory_format in MemoryFormat
        for variant in (Variant.TORCH, Variant.MUCUDNN)
    ]
    assert {(*cell.samples_s, cell.failure) for cell in cells} == {(1.0, 1.0, None)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model[0]) is nn.Conv2d


def test_peak_memory_is_that_of_a_step() -> None:
    """The output of the convolution, and at least once more its gradient; of bfloat16 half as much and the casts."""
    one, two = (measured_variants(wide(n), **FLOAT32)[0].more for n in (64, 128))
    added = 64 * 2 * 4 * 4 * 4  # bytes of 64 more channels of the output, N=2, 4x4, float32
    assert 2 * added <= two["peak_bytes"] - one["peak_bytes"] <= 8 * added
    assert two["grown_bytes"] is None or two["grown_bytes"] >= 0


def test_the_first_step_and_tuning_are_what_a_variant_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second here, and tuning a hundred."""
    now_s, optimize, learn = [0.0], mucudnn.optimize, Trainee.learn

    def optimized(*given: Any, **named: Any) -> Any:
        now_s[0] += 100
        return optimize(*given, **named)

    def learnt(*given: Any) -> Tensor:
        now_s[0] += 1
        return learn(*given)

    monkeypatch.setattr(training, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(mucudnn, "optimize", optimized)
    monkeypatch.setattr(Trainee, "learn", learnt)
    assert [row.more["ready_after_s"] for row in measured_variants(**FLOAT32)] == [1, 101]


def test_a_variant_has_no_groups_and_no_other_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    configs, optimize = list[Config](), mucudnn.optimize

    def seen(model: nn.Module, images: Tensor, config: Config, **named: Any) -> Any:
        configs.append(config)
        return optimize(model, images, config, **named)

    monkeypatch.setattr(mucudnn, "optimize", seen)
    both = (Variant.MUCUDNN, Variant.MUCUDNN_UNGROUPED)
    rows = measured_variants(options=TrainingOptions(CONFIG, rounds=1, clock=TickingClock(), variants=both), **FLOAT32)
    assert [row.contestant for row in rows] == [Variant.TORCH, *both]
    assert configs == [CONFIG, replace(CONFIG, fuse=False)]


def test_operators_are_watched_where_norms_are_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, init = list[bool](), StepTimes.__init__

    def noting(self: StepTimes, *given: Any, sees_operators: bool) -> None:
        seen.append(sees_operators)
        init(self, *given, sees_operators=sees_operators)

    monkeypatch.setattr(StepTimes, "__init__", noting)
    for how, expected in ((How.OPTIMIZE, [CONFIG.fuse is False, True, True]), (How.ENABLE, [True, True])):
        seen.clear()
        variants = (Variant.MUCUDNN, Variant.MUCUDNN_UNGROUPED)[: 1 + (how is How.OPTIMIZE)]
        measured_variants(
            options=TrainingOptions(CONFIG, rounds=1, clock=TickingClock(), variants=variants, how=how), **FLOAT32
        )
        assert sorted(seen) == expected


def wide(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Seen(nn.Module):
    """Remembers what comes out of it in training, in which thread, and whether cuDNN searches there."""

    def __init__(self, seen: list[tuple[torch.dtype, bool, int, bool]]) -> None:
        super().__init__()
        self.seen = seen

    def __deepcopy__(self, memo: object) -> Seen:
        return Seen(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        self.seen.append((x.dtype, channels_last, threading.get_ident(), torch.backends.cudnn.benchmark))
        return x


def test_steps_are_in_the_precision_and_format_and_in_threads_of_which_one_searches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = (Variant.TORCH, Variant.TORCH_BENCHMARK, Variant.MUCUDNN)
    monkeypatch.setattr("mucudnn.bench.suites.training.VARIANTS", {"cpu": every})
    seen: list[tuple[torch.dtype, bool, int, bool]] = []
    network = tiny()
    network.insert(1, Seen(seen))
    measured_variants(network, TrainingOptions(CONFIG, rounds=2, clock=TickingClock(), variants=every))
    for case in product((torch.float32, torch.bfloat16), (False, True)):
        of_thread: dict[int, set[bool]] = {}
        for *found, thread, searches in seen:
            if (*found,) == case and thread != threading.get_ident():
                of_thread.setdefault(thread, set()).add(searches)
        assert sorted(map(sorted, of_thread.values())) == [[False], [False], [True]], case


def test_a_variant_that_fails_has_its_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, left = Trainee.learn, [0]

    def failing(self: Trainee, *given: Any) -> Tensor:
        if isinstance(self.model[0], mucudnn.Conv2d):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("CUDA out of memory.\nand a stack trace")
        return learn(self, *given)

    monkeypatch.setattr(Trainee, "learn", failing)
    for left[0] in (0, 3):
        torchs, ours = measured_variants(**FLOAT32)
        assert torchs.samples_s
        assert (list(ours.samples_s), ours.failure) == ([], "CUDA out of memory.")


# What is set on CUDA: torch has the switches without a GPU, too


def test_tf32_is_allowed_where_it_is_asked_for_and_set_back_after_errors() -> None:
    def tf32() -> tuple[bool, bool]:
        return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    for precision, expected in (
        (Precision.TF32, (True, True)),
        (Precision.FLOAT32, (False, False)),
        (Precision.BFLOAT16, (True, False)),
    ):
        with suppress(KeyError), training._rounding(replace(SETTING, device="cuda", precision=precision)):
            assert tf32() == expected
            assert torch.backends.cudnn.conv.fp32_precision == ("tf32" if expected[0] else "none")
            raise KeyError
        assert tf32() == (True, False)
    with suppress(KeyError), searching(asked=True):
        raise KeyError
    assert not torch.backends.cudnn.benchmark


# Several networks


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build", lambda name: tiny())
    monkeypatch.setattr(training, "input_shape_of", lambda name: (3, 6, 6))


OPTIONS = TrainingOptions(replace(CONFIG, database=None), rounds=1, clock=TickingClock(), variants=(Variant.MUCUDNN,))


@pytest.mark.usefixtures("two_networks")
def test_networks_are_measured_once_each_with_its_batch_and_the_next_run_measures_nothing(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    asked = ["alexnet", "vgg16", "alexnet"], [2, 3, 2], replace(OPTIONS, **FLOAT32), tmp_path
    for _ in range(2):
        with in_threads(training):
            benchmark_training(*asked, progress=lambda text, fraction: told.append((text, fraction)))
    folder = read_folder(tmp_path)
    assert (folder.problems, folder.left_out) == ((), {})
    settings = [(line["network"], line["batch_size"]) for line in folder.lines]
    assert settings == [("alexnet", 2)] * 2 + [("vgg16", 3)] * 2
    assert [fraction for text, fraction in told if text.endswith("torch starts")] == [0.0, 0.5]
    with pytest.raises(InvalidInputError, match=r"batch_sizes was \[2, 3, 2\] and is \[4\]"):
        benchmark_training(["alexnet"], [4], *asked[2:])


@pytest.mark.usefixtures("two_networks")
def test_memory_formats_take_turns(tmp_path: Path) -> None:
    with in_threads(training):
        benchmark_training(["alexnet"], [2], replace(OPTIONS, precisions=[Precision.FLOAT32]), tmp_path)
    lines = read_folder(tmp_path).lines
    assert [(line["memory_format"], line["contestant"]) for line in lines] == [
        *product(("contiguous", "channels_last"), ("torch", "mucudnn"))
    ]
    assert {(line["turns"], line["rows_in_turns"]) for line in lines} == {(1, 4)}


def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "find_spec", lambda package: None)
    (tmp_path / "whole_numbers.py").write_text(NET.replace("nn.Linear(4, 10)", "Argmax()"))
    (tmp_path / "json.py").write_text("")
    tf32, searching = (
        replace(OPTIONS, precisions=[Precision.TF32]),
        replace(OPTIONS, variants=[Variant.TORCH_BENCHMARK]),
    )
    enabled = replace(OPTIONS, variants=[Variant.MUCUDNN_UNGROUPED], how=How.ENABLE)
    for source, batch_size, options, told in (
        ("vgg-16", 2, OPTIONS, "did you mean vgg16"),
        ("alexnet", 2**40, OPTIONS, "it must be at most"),
        ("deepbench-train", 2, OPTIONS, "deepbench-train has no model to run; name one of"),
        (f"{tmp_path / 'whole_numbers.py'}:net", 2, OPTIONS, "no output of the model has a gradient"),
        (f"{tmp_path / 'missing.py'}:net", 2, OPTIONS, r"there is no file .*missing\.py"),
        (f"{tmp_path / 'json.py'}:net", 2, OPTIONS, r"there is another module json, .*: give the file another name"),
        ("alexnet", 2, tf32, "precision is tf32; device 'cpu' has float32, bfloat16"),
        ("alexnet", 2, searching, "variant is torch-benchmark; device 'cpu' has torch, torch-compile, mu"),
        ("alexnet", 2, enabled, "variant is mucudnn-ungrouped; device 'cpu' has torch, torch-compile, mucudnn, mu"),
        ("seresnet18", 2, OPTIONS, "^seresnet18 is a network of timm, which is not installed: pip install timm"),
    ):
        size = None if ":" not in source else (3, 6, 6)
        with pytest.raises((InvalidInputError, UnavailableError), match=told):
            benchmark_training([source], [batch_size], options, tmp_path / "out", input_size=size)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked")
def test_a_model_of_the_user_is_trained_in_processes(tmp_path: Path) -> None:
    """It is defined in a file in another folder than this one, which the processes find."""
    (tmp_path / "net_of_a_user.py").write_text(NET)
    source, out = f"{tmp_path / 'net_of_a_user.py'}:net", tmp_path / "out"
    only = ("--precisions", "float32", "--memory-format", "contiguous", "--input", "3x6x6", "--out", out)
    result = invoke("bench", "training", source, *QUICK, *SOME, *only)
    assert result.exit_code == 0, result.output
    lines = read_folder(out).lines
    assert [(c["network"], c["contestant"], c["failure"]) for c in lines] == [
        (source, "torch", None),
        (source, "mucudnn", None),
    ]
    for line, kinds in zip(
        lines, (("first layer", "activation", "linear", "rest"), ("first layer", "rest")), strict=True
    ):
        assert min(line["kinds_s"][kind] for kind in kinds) > 0


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


def row(variant: Variant, setting: Setting = SETTING, failure: str | None = None, **more: Any) -> Row:
    return Row(setting.subject(), variant, more.pop("samples", ()), failure=failure, more=more)


def split(forward_s: float, backward_s: float, rest_s: float) -> dict[str, float]:
    return {"forward_convolutions_s": forward_s, "backward_convolutions_s": backward_s, "rest_s": rest_s}


def test_the_tables_compare_with_torch_of_the_same_setting_and_say_what_is_missing(tmp_path: Path) -> None:
    """In the first network a variant failed; in the second mucudnn was enabled and failed; the third is not split.

    The fourth has two memory formats: torch is faster in one, and mucudnn in the other.
    """
    enabled = replace(SETTING, network="enabled", batch_size=4, how=How.ENABLE)
    third, fourth = replace(SETTING, network="third"), replace(SETTING, network="fourth")
    ready = {"ready_after_s": 12.34, "grown_bytes": 3 * 2**20}
    kinds_s = {"3x3": 0.15, "rest": 0.05}
    rows = (
        row(Variant.TORCH, samples=(0.199, 0.2, 0.203), peak_bytes=2**21, kinds_s=kinds_s, **split(0.05, 0.1, 0.05)),
        row(Variant.MUCUDNN, samples=(0.098, 0.1, 0.102), peak_bytes=2**20, **split(0.02, 0.04, 0.0525)),
        row(Variant.TORCH_BENCHMARK, failure="out of memory"),
        row(Variant.TORCH, enabled, samples=(0.3,), peak_bytes=2**21),
        row(Variant.MUCUDNN, enabled, "out of memory"),
        row(Variant.TORCH, third, samples=(0.2,), peak_bytes=2**21, **split(0.05, 0.1, 0.05)),
        row(Variant.MUCUDNN, third, samples=(0.1,), peak_bytes=9, not_split="why"),
        *(
            row(variant, replace(fourth, memory_format=name), samples=(time_s,), peak_bytes=2**20, **ready)
            for variant, *times_s in (
                (Variant.TORCH, 0.4, 0.3),
                (Variant.TORCH_COMPILE, 0.6, 0.3),
                (Variant.MUCUDNN, 0.1, 0.2),
                (Variant.MUCUDNN_UNGROUPED, 0.3, 0.2),
            )
            for name, time_s in zip(MemoryFormat, times_s, strict=True)
        ),
    )
    settings = {"workspace_limit": "64MiB", "workspace_budget": None}
    with open_folder(tmp_path, Header("training", "tiny", settings, ENVIRONMENT, COLUMNS, 2)) as folder:
        for one in rows:
            folder.add([one])
        folder.write_summary()
    assert_as_stored("bench-training", *training_tables(read_folder(tmp_path)))


def test_the_command_shows_and_writes_what_is_ready_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure, done = training.measured_rows, list[Setting]()

    def interrupted(settings: Sequence[Setting], *given: Any) -> list[Row]:
        if done:
            raise KeyboardInterrupt
        done.extend(settings)
        return measure(settings, *given)

    monkeypatch.setattr(models, "build", lambda name: tiny())
    monkeypatch.setattr(training, "measured_rows", interrupted)
    with in_threads(training):
        result = invoke("bench", "training", "alexnet", *QUICK, *SOME, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "alexnet, batch 2: training steps" in result.stdout
    assert "alexnet, batch 2, bfloat16 channels_last: the run was stopped before" in result.stdout
    assert "All measurements are kept" in result.stderr
    assert [line["contestant"] for line in read_folder(tmp_path / "out").lines] == ["torch", "mucudnn"] * 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TickingClock:
    """The one clock of steps and of convolutions: each of these takes a second, and reading it as much."""
    ticking = TickingClock()
    monkeypatch.setattr("mucudnn.optimizing.steps.time.perf_counter", ticking.now)
    return ticking


def test_a_step_is_split_into_convolutions_and_the_rest(clock: TickingClock) -> None:
    """Two convolutions, each a second forward, and backward; the others' time is the rest, with that of reading."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), Slow(clock), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 10))
    torchs, ours = measured_variants(network, TrainingOptions(CONFIG, rounds=3, clock=clock), **FLOAT32)
    assert (torchs.more["forward_convolutions_s"], torchs.more["backward_convolutions_s"]) == (2, 2)
    assert torchs.more["rest_s"] == 100 + 5  # after each convolution until the next, and around all of them
    assert set(torchs.samples_s) == {101}  # nothing but the step, and the clock is read once
    assert ours.more["forward_convolutions_s"] == 2


def test_a_step_that_cannot_be_split_is_told_and_its_time_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StepTimes, steps: int) -> None:
        raise mucudnn.UnavailableError("torch's convolution is replaced by another package")

    monkeypatch.setattr(StepTimes, "parts", refuse)
    for row in measured_variants(**FLOAT32):
        assert (len(row.samples_s), row.failure) == (2, None)
        assert "rest_s" not in row.more
        assert row.more["not_split"] == "not split: torch's convolution is replaced by another package"


def test_steps_that_are_timed_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the clock around every convolution would slow them."""
    recording, timed = [False], []
    ask, time = Entrant.ask, TickingClock.time

    def marked(self: Entrant[Any], steps: int) -> Any:
        recording[0] = True
        parts = ask(self, steps)
        recording[0] = False
        return parts

    def watched(self: TickingClock, function: Callable[[], object], *given: int) -> float:
        if not recording[0]:
            timed.append(bool(dispatcher._wrappers))
        return time(self, function, *given)

    monkeypatch.setattr(Entrant, "ask", marked)
    monkeypatch.setattr(TickingClock, "time", watched)
    measured_variants(**FLOAT32)
    assert timed
    assert not any(timed)
