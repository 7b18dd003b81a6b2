"""Every number on the page, computed once more from the files of the folder, without the code that made the page."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from math import nan, prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pytest
from support.result_folders import MIB, training_layers, write_random_folder
from support.tables_of_page import PageParser

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.pages.report import report_of
from mucudnn.bench.pages.reports import html_of, reports_in, write_frame, write_layers

pytest.importorskip("jinja2")
Line = Mapping[str, Any]
Form = str
OPERATIONS = {"forward": "forward", "backward_data": "backward inputs", "backward_filter": "backward parameters"}
REFERENCE = Path(__file__).parents[3] / "bench/sources/data/deepbench_reference.csv"
CONTESTANT = ("contestant", "policy", "limit_bytes")
ROUNDS, LIMITS = 7, (8 * MIB, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small first layers, strided ones, and two that were published twice."""
    every = training_layers()
    twice = [layer for layer in every if (layer.batch_size, layer.problem.k, layer.problem.h) == (8, 512, 7)]
    layers = [*every[:2], *every[40:42], *twice[:1]]
    path = tmp_path_factory.mktemp("results") / "folder"
    return write_random_folder(path, layers, rounds=ROUNDS, limits=LIMITS)


@pytest.fixture(scope="module")
def page(folder: Path) -> PageParser:
    return PageParser(html_of(reports_in(folder), with_pictures=False))


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rates(folder: Path) -> tuple[float, float]:
    limits = json.loads((folder / "environment.json").read_text())["machine_limits"]["float32"]
    return limits["flops_per_s"], limits["bytes_per_s"]


def shown(value: float | None, form: Form) -> str:
    return "" if value is None or value != value else format(value, form)


def torch_of(line: Line, lines: Sequence[Line]) -> Line:
    (found,) = (one for one in lines if one["turns"] == line["turns"] and one["contestant"] == "torch")
    return found


def output_size(line: Line) -> tuple[int, int]:
    p, q = ((line[a] + 2 * line[f"pad_{a}"] - line[f]) // line[f"stride_{a}"] + 1 for a, f in (("h", "r"), ("w", "s")))
    return p, q


def flops(line: Line) -> int:
    return int(2 * prod(line[name] for name in ("batch_size", "k", "c", "r", "s")) * prod(output_size(line)))


def bound_s(line: Line, rates: tuple[float, float]) -> float:
    n, c, h, w, k, r, s = (line[name] for name in ("batch_size", "c", "h", "w", "k", "r", "s"))
    p, q = output_size(line)
    rows = h if line["operation"] == "backward_data" else min(h, p * r)
    least = 4 * (n * c * rows * w + k * c * r * s + n * k * p * q)
    return max(flops(line) / rates[0], least / rates[1])


def speedup(torchs: Sequence[Line], ours: Sequence[Line]) -> tuple[float, float, float]:
    """Ratio of the sums of medians, and its interval: 1000 times as many rounds are drawn as there are."""
    if ours[0]["contestant"] == "torch":
        return nan, nan, nan

    def total(every: Sequence[Line]) -> float:
        return sum(median(line["samples_s"]) for line in every)

    drawn = []
    draws = [np.random.default_rng(seed).integers(ROUNDS, size=(1000, ROUNDS)) for seed in range(len(ours))]
    for each in range(1000):
        both = [
            sum(median([line["samples_s"][i] for i in draws[op][each]]) for op, line in enumerate(every))
            for every in (torchs, ours)
        ]
        drawn.append(both[0] / both[1])
    return total(torchs) / total(ours), *np.quantile(drawn, (0.025, 0.975))


def published(line: Line) -> dict[str, float]:
    """Published seconds by machine: the shortest of the file's lines with this geometry."""
    geometry = {"n": "batch_size"} | {name: name for name in ("c", "h", "w", "k", "r", "s")}
    geometry |= {name: name for name in ("pad_h", "pad_w", "stride_h", "stride_w")}
    found: dict[str, list[float]] = {}
    with REFERENCE.open() as stream:
        for each in csv.DictReader(stream):
            is_same = all(int(each[theirs]) == line[ours] for theirs, ours in geometry.items())
            if is_same and (text := each[f"{line['operation']}_ms"]):
                found.setdefault(f"{each['device']} {each['dtype']}", []).append(float(text) / 1e3)
    return {machine: min(times) for machine, times in found.items()}


def test_every_number_of_the_operations(page: PageParser, lines: list[Line], rates: tuple[float, float]) -> None:
    records = page.tables["problems"].records()
    assert len(records) == len(lines) == 5 * 3 * 5
    for record, line in zip(records, lines, strict=True):
        time_s = median(line["samples_s"])
        low, _, high = quantiles(line["samples_s"], n=4, method="inclusive")
        ratio = speedup([torch_of(line, lines)], [line])
        expected = {
            "subject: layer": line["layer"],
            "subject: operation": line["operation"],
            "subject: kind of layer": record["subject: kind of layer"],  # a word; its own test is beside it
            "subject: n": str(line["batch_size"]),
            "subject: memory format": line["memory_format"],
            **contestant(line),
            "time: median, ms": shown(time_s * 1e3, ".4f"),
            "time: spread, %": shown((high - low) / time_s * 100, ".1f"),
            "time: samples": str(ROUNDS),
            "time: TFLOP/s": shown(flops(line) / time_s / 1e12, ".4f"),
            "configuration: configuration": line["configuration"] or "",
            "configuration: same configuration as": same_as([line], lines),
            **elsewhere("ms", [line]),
            **ours(ratio, line["workspace_bytes"], line["relative_error"], line["load"]),
            "limit: time / bound": shown(time_s / bound_s(line, rates), ".3f"),
        }
        assert record == expected


def grouped(lines: Sequence[Line], *names: str) -> list[list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return [*groups.values()]


def contestant(line: Line) -> dict[str, str]:
    return {
        "contestant: contestant": line["contestant"],
        "contestant: policy": line["policy"] or "",
        "contestant: workspace limit, MiB": shown(line["limit_bytes"] and line["limit_bytes"] / MIB, ".6g"),
    }


def elsewhere(title: str, group: Sequence[Line]) -> dict[str, str]:
    """Published milliseconds of a group by machine."""
    machines = ("KNL7250 float32", "P100 float32", "V100 float16", "V100 float32")
    seconds = {machine: sum(published(line).get(machine, nan) for line in group) for machine in machines}
    return {f"{title}, published elsewhere: {name}": shown(each * 1e3, ".4f") for name, each in seconds.items()}


def ours(ratio: tuple[float, float, float], workspace: int | None, error: float | None, load: float) -> dict[str, str]:
    return {
        "speedup, 95 % interval: speedup over PyTorch": shown(ratio[0], ".3f"),
        "speedup, 95 % interval: from": shown(ratio[1], ".3f"),
        "speedup, 95 % interval: to": shown(ratio[2], ".3f"),
        "mucudnn: workspace, MiB": shown(nan if workspace is None else workspace / MIB, ".3f"),
        "mucudnn: relative error": shown(error, ".1e"),
        "machine: load, %": shown(load * 100, ".0f"),
    }


def same_as(group: Sequence[Line], lines: Sequence[Line]) -> str:
    """Whether all of a group run what the undivided runs under the same limit."""
    names = ("turns", "limit_bytes", "configuration")
    undivided = [[line[name] for name in names] for line in lines if line["contestant"] == "undivided"]
    is_same = group[0]["contestant"] == "mucudnn" and all([line[name] for name in names] in undivided for line in group)
    return "undivided" if is_same else ""


def most(lines: Sequence[Line], name: str) -> Any:
    return max((line[name] for line in lines if line[name] is not None), default=None)


def test_every_number_of_the_layers(page: PageParser, lines: list[Line], rates: tuple[float, float]) -> None:
    records, groups = page.tables["layers"].records(), grouped(lines, "layer", *CONTESTANT)
    assert len(records) == len(groups) == 5 * 5
    for record, group in zip(records, groups, strict=True):
        first, times = group[0], [median(line["samples_s"]) for line in group]
        assert [line["operation"] for line in group] == list(OPERATIONS)
        sizes = {name: name for name in ("w", "h", "c", "k", "pad_w", "pad_h", "stride_w", "stride_h")}
        sizes |= {"n": "batch_size", "f_w": "s", "f_h": "r", "precision": "dtype", "memory format": "memory_format"}
        ratio = speedup([torch_of(line, lines) for line in group], group)
        expected = {
            "layer: layer": first["layer"],
            **contestant(first),
            **{f"DeepBench's columns: {title}": str(first[name]) for title, name in sizes.items()},
            **{f"time, ms: {name}": shown(t * 1e3, ".4f") for name, t in zip(OPERATIONS.values(), times, strict=True)},
            "time, ms: total": shown(sum(times) * 1e3, ".4f"),
            "rate: TFLOP/s": shown(sum(map(flops, group)) / sum(times) / 1e12, ".4f"),
            **{f"configuration: {OPERATIONS[line['operation']]}": line["configuration"] or "" for line in group},
            **elsewhere("total, ms", group),
            **ours(ratio, most(group, "workspace_bytes"), most(group, "relative_error"), most(group, "load")),
            "limit: time / bound": shown(sum(times) / sum(bound_s(line, rates) for line in group), ".3f"),
        }
        assert record == expected


def test_every_number_of_the_summary(page: PageParser, lines: list[Line], rates: tuple[float, float]) -> None:
    for record, group in zip(page.tables["summary"].records(), grouped(lines, *CONTESTANT), strict=True):

        def total(of: Callable[[Line], Line], group: Sequence[Line] = group) -> float:
            return sum(line["count"] * median(of(line)["samples_s"]) for line in group)

        def mean(operation: str | None, group: Sequence[Line] = group) -> float:
            return geometric_mean(
                speedup_alone(line, lines) for line in group if operation in (None, line["operation"])
            )

        title = "speedup over PyTorch, geometric mean"
        over = geometric_mean(median(line["samples_s"]) / bound_s(line, rates) for line in group)
        low, high = mean_interval(group, lines)
        assert record == {
            **contestant(group[0]),
            "contestant: timed": str(len(group)),
            f"{title}: all": shown(mean(None), ".3f"),
            f"{title}: from": shown(low, ".3f"),
            f"{title}: to": shown(high, ".3f"),
            **{f"{title}: {name}": shown(mean(operation), ".3f") for operation, name in OPERATIONS.items()},
            "limit: time / bound, geometric mean": shown(over, ".3f"),
            "sum of times, ms: all": shown(total(lambda line: line) * 1e3, ".4f"),
            "sum of times, ms: PyTorch for the same": shown(total(lambda line: torch_of(line, lines)) * 1e3, ".4f"),
        }


def mean_interval(group: Sequence[Line], lines: Sequence[Line]) -> tuple[float, float]:
    """Quantiles of the geometric mean of speedups, of 1000 times as many rounds as there are, drawn for each."""
    if group[0]["contestant"] == "torch":
        return nan, nan
    logarithms = np.zeros(1000)
    for seed, line in enumerate(group):
        for each, places in enumerate(np.random.default_rng(seed).integers(ROUNDS, size=(1000, ROUNDS))):
            torchs, own = ([of["samples_s"][place] for place in places] for of in (torch_of(line, lines), line))
            logarithms[each] += np.log(median(torchs) / median(own)) / len(group)
    low, high = np.exp(np.quantile(logarithms, (0.025, 0.975)))
    return float(low), float(high)


def speedup_alone(line: Line, lines: Sequence[Line]) -> float:
    if line["contestant"] == "torch":
        return nan
    return median(torch_of(line, lines)["samples_s"]) / median(line["samples_s"])


def geometric_mean(values: Any) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def test_files_for_programs_have_the_same_with_all_digits(folder: Path, lines: list[Line], tmp_path: Path) -> None:
    report = report_of(read_folder(folder))
    write_layers(report.layers, tmp_path / "layers.csv")
    write_frame(report.rows, tmp_path / "operations.csv")
    with (tmp_path / "operations.csv").open() as stream:
        for row, line in zip(csv.DictReader(stream), lines, strict=True):
            assert float(row["time_s"]) == median(line["samples_s"])
            assert "samples_s" not in row
    with (tmp_path / "layers.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0])[:6] == ["layer", "w", "h", "c", "n", "k"]
    medians = [median(line["samples_s"]) for line in lines if line["contestant"] == "torch"]
    totals = [float(row["total_ms"]) for row in rows if row["contestant"] == "torch"]
    assert totals == pytest.approx([sum(medians[i : i + 3]) * 1e3 for i in range(0, len(medians), 3)], rel=1e-12)
