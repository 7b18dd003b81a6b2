"""Result folders of made-up times, as ``bench convolutions`` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from support.clock.machine import ENVIRONMENT

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import MEASUREMENTS_FILE, PROBLEM_COLUMNS, Header, problem_columns
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources.layers import Layer, load_source
from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.files import whole_text
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Measurement, MicroConfig
from mucudnn.measuring.load import Load
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines
from mucudnn.store.sqlite_file import MEMORY

MIB = 2**20
LIMITS = (8 * MIB, 64 * MIB, 512 * MIB)
MACHINE = MachineLimits(150e9, 12e9)


def training_layers(most: int | None = None) -> Sequence[Layer]:
    """Layers of DeepBench's training table."""
    return load_source("deepbench-train").layers[:most]


def write_random_folder(
    path: Path,
    layers: Sequence[Layer],
    *,
    limits: Sequence[int | None] = LIMITS,
    policies: Sequence[str] = ("power-of-two",),
    rounds: int = 15,
    left_out: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    candidates: bool = True,
) -> Path:
    """Write a folder in which every operation of every layer has torch, the undivided and ours.

    candidates: with what was measured to choose from; False: without ``measurements.jsonl``.
    """
    random = Random(seed)
    header = Header(
        *(
            "convolutions",
            "deepbench-train",
            {
                "rounds": rounds,
                "workspace_limit": list(limits),
                "policy": list(policies),
                "algorithms": None,
                "max_relative_error": None,
                **(settings or {}),
            },
            ENVIRONMENT,
        ),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=3 * len(layers),
        limits={"float32": MACHINE},
    )
    with open_folder(path, header) as folder, Database(MEMORY) as database:
        for layer in layers:
            for operation in Operation:
                problem = layer.problem.with_operation(operation)
                rows = _rows(layer, problem, limits, policies, rounds, random)
                for one in made_up_measurements(problem, layer.batch_size, random) if candidates else ():
                    database.add(ENVIRONMENT, problem, 1, one)
                folder.add(rows, Load(others_share=random.random() / 6))
        if candidates:
            with whole_text(path / MEASUREMENTS_FILE) as stream:
                export_json_lines(database, stream)
        folder.write_summary(left_out)
    return path


def made_up_measurements(problem: ConvProblem, n: int, random: Random) -> list[Measurement]:
    """Return made-up measurements of some algorithms at powers of two."""
    setup_s = MACHINE.bound_s(problem, n) / 20
    return [
        _measurement(MicroConfig(name, size), MACHINE.bound_s(problem, size) * slowness, setup_s, scratch, random)
        for name, slowness, scratch in (("native", 2.0, 0), ("gemm", 1.5, 2000), ("fft", 0.9, 9000), ("bad", 0.1, 0))
        for size in micro_batch_sizes(BatchSizePolicy.POWER_OF_TWO, n)
    ]


def _measurement(of: MicroConfig, step_s: float, setup_s: float, scratch: int, random: Random) -> Measurement:
    samples = tuple(sorted(step_s * random.lognormvariate(0, 0.1) for _ in range(5)))
    return Measurement(
        of,
        setup_s=0.0 if of.algorithm == "native" else setup_s * random.uniform(0.1, 2),  # as different as noise makes it
        step_s=samples[2],
        prepared_bytes=0 if of.algorithm == "native" else 4096,
        scratch_bytes=scratch * of.micro_batch_size,
        relative_error=1.0 if of.algorithm == "bad" else 1e-6 * random.uniform(0.1, 1),
        setup_samples_s=(setup_s,) * 5,
        step_samples_s=samples,
    )


def _rows(
    layer: Layer,
    problem: ConvProblem,
    limits: Sequence[int | None],
    policies: Sequence[str],
    rounds: int,
    random: Random,
) -> list[Row]:
    n = layer.batch_size
    subject = {"layer": layer.name, **problem_columns(problem, n)}
    bound_s = MACHINE.bound_s(problem, n)
    more = {"count": layer.count}
    times = {"tuning_s": random.uniform(0.1, 2), "solve_s": random.uniform(0.001, 0.01)}

    def samples(over: float) -> list[float]:
        return [bound_s * over * random.lognormvariate(0, 0.05) for _ in range(rounds)]

    rows = [Row(subject, "torch", samples(random.uniform(1.5, 4)), relative_error=2e-7, more=more)]
    for policy in ("undivided", *policies):
        contestant = "undivided" if policy == "undivided" else "mucudnn"
        for limit in limits:
            text = f"winograd-4x4 {n}" if contestant == "undivided" else _divided(n, random)
            rows.append(
                Row(
                    *(subject, contestant, samples(random.uniform(0.8, 3)), policy, limit, text),
                    workspace_bytes=random.randrange(1 + min(limits[0] or MIB, MIB)),
                    relative_error=random.uniform(1e-7, 1e-5),
                    more=more | times,
                )
            )
    return rows


def _divided(n: int, random: Random) -> str:
    """Return a configuration of n samples, as text."""
    first = random.randint(1, n)
    count, rest = divmod(n, first)
    times = f"×{count}" if count > 1 else ""
    parts = [f"{random.choice(('winograd-4x4', 'implicit-gemm', 'fft'))} {first}{times}"]
    return " + ".join([*parts, f"gemm {rest}"] if rest else parts)
