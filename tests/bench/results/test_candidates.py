"""What was measured to choose from stands in a result folder as the database exports it, and is read from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from support.clock.machine import ENVIRONMENT, FORWARD
from support.result_folders import made_up_measurements

from mucudnn.bench.results.pages.measured import tuned_operations
from mucudnn.bench.results.reading import MEASUREMENTS_FILE, PROBLEM_COLUMNS, Header, problem_columns, read_folder
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.solver.front import desirable_sets
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines
from mucudnn.store.sqlite_file import MEMORY

SETTINGS = {"policy": ["power-of-two"], "algorithms": None, "max_relative_error": None}
OTHER = replace(FORWARD, k=FORWARD.k + 1)  # not in the folder


def written(path: Path, **settings: Any) -> Path:
    """Write a folder with layers of 6 and of 2 samples, of one problem, and what was measured with 6, 8 and 2."""
    columns = ("layer", *PROBLEM_COLUMNS)
    header = Header("convolutions", "a network", SETTINGS | settings, ENVIRONMENT, subject_columns=columns, wanted=2)
    with open_folder(path, header) as folder, Database(MEMORY) as database:
        for name, n, time_s in (("small", 2, 0.1), ("large", 6, 0.3)):
            folder.add([Row({"layer": name, **problem_columns(FORWARD, n)}, "torch", (time_s,))])
        folder.write_summary()
        for n in (8, 6):
            for one in made_up_measurements(FORWARD, n, Random(n)):
                database.add(ENVIRONMENT, FORWARD, 1, one)
        database.add(ENVIRONMENT, OTHER, 1, made_up_measurements(OTHER, 2, Random(1))[0])
        with (path / MEASUREMENTS_FILE).open("w") as stream:
            export_json_lines(database, stream, ENVIRONMENT, [FORWARD])
    return path


def test_candidates_are_what_the_run_could_choose_from(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    folder = read_folder(path)
    assert folder.problems == ()
    assert list(folder.measurements) == [FORWARD]
    large, small = tuned_operations(folder)
    assert (large.name, large.batch_size, small.name) == ("large forward", 6, "small forward")
    for subject, sizes in ((large, {1, 2, 4, 6}), (small, {1, 2})):
        usable = [m for m in folder.measurements[FORWARD] if m.micro_config.micro_batch_size in sizes]
        usable = [m for m in usable if m.micro_config.algorithm != "bad"]
        assert len(subject.allowed) == len(usable) == 3 * len(sizes)
        expected = desirable_sets(usable, subject.batch_size).of(subject.batch_size)
        points = list(subject.desirable.itertuples(index=False, name=None))
        assert points == [(c.time_s, c.workspace_bytes) for c in expected]
        for row in subject.allowed.to_dict("records"):
            (one,) = [
                m
                for m in usable
                if (m.micro_config.algorithm, m.micro_config.micro_batch_size)
                == (row["algorithm"], row["micro_batch_size"])
            ]
            assert (row["setup_s"], row["step_s"], row["scratch_bytes"]) == (one.setup_s, one.step_s, one.scratch_bytes)


def test_algorithms_and_bounds_are_those_of_the_run(tmp_path: Path) -> None:
    for index, (settings, expected) in enumerate(
        (
            ({"algorithms": ["fft"]}, {"fft", "native"}),
            ({"max_relative_error": 2.0}, {"fft", "gemm", "native", "bad"}),
            ({"policy": ["undivided"]}, {"fft", "gemm", "native"}),
        )
    ):
        large, _ = tuned_operations(read_folder(written(tmp_path / str(index), **settings)))
        assert set(large.allowed["algorithm"]) == expected
        assert set(large.allowed["micro_batch_size"]) == ({6} if "policy" in settings else {1, 2, 4, 6})


def test_a_damaged_file_is_told_and_rows_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    file = path / MEASUREMENTS_FILE
    lines = file.read_text().splitlines()
    for text in (lines[0][:-9], json.dumps(json.loads(lines[0]) | {"step_s": -1}), "[]", ""):
        file.write_text(f"{text}\n")
        folder = read_folder(path)
        assert len(folder.rows) == 2
        (problem,) = folder.problems
        assert MEASUREMENTS_FILE in problem
        assert tuned_operations(folder) == []
