"""README's figures on this machine: a network's convolutions, its training step, within less memory, and one image.

Other benchmarks measure them, in turns with PyTorch. The result is one record, such as those in docs/results that
README quotes; the newest of these is in the package, and is shown beside what is measured here.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import mucudnn
from mucudnn.bench.results.reading import Line, read_folder
from mucudnn.bench.results.variants import TORCH, Precision, Runtime, Saving, Variant
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.models import seeded_model
from mucudnn.bench.sources.published import README_FILE
from mucudnn.bench.suites.budgets import BudgetOptions, benchmark_budgets
from mucudnn.bench.suites.convolutions import OURS, Compared, benchmark_convolutions
from mucudnn.bench.suites.inference import compare_runtimes
from mucudnn.bench.suites.training import TrainingOptions, benchmark_training
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.records import Comparison
from mucudnn.core.tables import Table, milliseconds, new_table
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.running.devices import current_environment

NETWORK, BATCH_SIZE, BUDGET = "resnet18", 2, "1/2"
MEMORY_FORMAT = MemoryFormat.CHANNELS_LAST  # PyTorch's faster one
ROUNDS, IMAGE_ROUNDS, SHORT_S = 5, 15, 0.1
TIME_LIMIT, RUN_LIMIT_S = "1s", 80.0  # of a problem's tuning; after which no further row is begun
_CPU_INFO = Path("/proc/cpuinfo")


def measured_readme(database: Path | None, progress: Progress = silent) -> dict[str, Any]:
    """Measure README's figures, in a minute or two; return the record, as JSON values.

    A row that fails, or is not begun in time on a slow or busy machine, has the reason instead of numbers. Raises
    ``DatabaseError`` for a database that cannot be used.
    """
    config = Config(time_limit=TIME_LIMIT, database=database)
    limits = (config.workspace_limit_bytes,)
    compared = Compared(limits=limits, memory_formats=(MEMORY_FORMAT,), rounds=ROUNDS, short_s=SHORT_S)
    steps = TrainingOptions(config, [Precision.FLOAT32], [MEMORY_FORMAT], [Variant.MUCUDNN], ROUNDS)
    within = BudgetOptions(config, [Saving.MUCUDNN], MEMORY_FORMAT, ROUNDS)
    fused = replace(config, fuse=True, workspace_limit=None, cache_budget=None)
    model, image = seeded_model(NETWORK, 1, memory_format=MEMORY_FORMAT)
    of_image: dict[str, Any] = {"memory_format": MEMORY_FORMAT, "rounds": IMAGE_ROUNDS, "runtimes": [Runtime.MUCUDNN]}
    step, sizes = ([NETWORK], [BATCH_SIZE]), f"{BATCH_SIZE} images"
    benchmarks: dict[str, Callable[..., None]] = {
        f"all convolutions, {sizes}": partial(
            benchmark_convolutions, load_source(NETWORK, batch=BATCH_SIZE), config, compared
        ),
        f"training step, {sizes}": partial(benchmark_training, *step, steps),
        "inference, 1 image": partial(compare_runtimes, model.eval(), image, fused, **of_image),
        f"training step within {BUDGET} of the memory": partial(benchmark_budgets, *step, [BUDGET], within),
    }
    rows, begun_s = list[dict[str, Any]](), perf_counter()
    with TemporaryDirectory() as folder:
        for number, (title, benchmark) in enumerate(benchmarks.items()):
            if perf_counter() - begun_s > RUN_LIMIT_S:
                rows.append({"title": title, "failure": f"not begun: {RUN_LIMIT_S:.0f} s were over"})
                continue
            out = Path(folder, str(number))
            benchmark(out, progress=share_of(progress, number / len(benchmarks), 1 / len(benchmarks)))
            rows.append(_row(title, read_folder(out).lines))
    return {
        "format_version": 1,
        "mucudnn": mucudnn.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "environment": asdict(current_environment()),
        "network": NETWORK,
        "took_s": perf_counter() - begun_s,
        "rows": rows,
    }


def _row(title: str, lines: Sequence[Line]) -> dict[str, Any]:
    """Return a row of the record: times of PyTorch and mucudnn, of all lines together, each as often as it occurs."""
    samples, peaks = [], []
    for contestant in (TORCH, OURS):
        own = [line for line in lines if line["contestant"] == contestant]
        if failure := next((line["failure"] for line in own if line["failure"]), None):
            return {"title": title, "failure": f"{contestant}: {failure}"}
        # Short calls have more samples than there are rounds of all.
        rounds = zip(*([line.get("count", 1) * s for s in line["samples_s"]] for line in own), strict=False)
        samples.append([sum(times) for times in rounds])
        peaks.append(own[0].get("peak_bytes"))
    compared = Comparison.of(*samples)
    return {
        "title": title,
        "torch_s": compared.baseline_s,
        "mucudnn_s": compared.time_s,
        "speedup": compared.speedup,
        "noise": compared.noise,
        "torch_peak_bytes": peaks[0],
        "mucudnn_peak_bytes": peaks[1],
        "load": max((line["load"] for line in lines if line["load"] is not None), default=None),
        "torch_samples_s": samples[0],
        "mucudnn_samples_s": samples[1],
    }


def _processor() -> str:
    """Return the processor's name with the numbers of its generation, as ``AMD EPYC, family 25, model 17``."""
    device = current_environment().device
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    numbers = dict(re.findall(r"^(?:cpu )?(family|model)\s*:\s*(\d+)$", text, re.MULTILINE))
    return ", ".join((device, *(f"{name} {numbers[name]}" for name in ("family", "model") if name in numbers)))


def published_readme() -> dict[str, Any]:
    """Return the record that README quotes."""
    record: dict[str, Any] = json.loads(README_FILE.read_text(encoding="utf-8"))
    return record


def readme_table(record: Mapping[str, Any], published: Mapping[str, Any]) -> Table:
    """Return a table of a record's rows, with the speedups here beside those of README."""
    columns = ("README", "here", "PyTorch ms", "mucudnn ms", "of its memory")
    table = new_table(f"{record['network']}: PyTorch's time / mucudnn's", ("",), columns)
    speedups = {row["title"]: row.get("speedup") for row in published["rows"]}
    for row in record["rows"]:
        speedup = speedups.get(row["title"])
        cells = [row["title"], "" if speedup is None else f"{speedup:.2f}"]
        if failure := row.get("failure"):
            table.add_row(*cells, failure)
            continue
        share = "" if row["torch_peak_bytes"] is None else f"{row['mucudnn_peak_bytes'] / row['torch_peak_bytes']:.2f}"
        times = milliseconds(row["torch_s"]), milliseconds(row["mucudnn_s"])
        table.add_row(*cells, f"{row['speedup']:.2f} ± {row['noise']:.2f}", *times, share)
    table.caption = "\n".join(f"{name}: {_told(one)}" for name, one in (("README", published), ("here", record)))
    return table


def _told(record: Mapping[str, Any]) -> str:
    environment = record["environment"]
    threads, torch = environment["threads"], environment["torch"]
    return f"{record['processor']}, {threads} threads, torch {torch}, Python {record['python']}, {record['date'][:10]}"
