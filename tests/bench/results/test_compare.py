"""Two folders side by side: verdicts under noise like that of two shared cores, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, log
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.clock.machine import ENVIRONMENT
from support.command_line import fail, invoke

from mucudnn.bench.results.comparison import FolderComparison, Pair, Verdict, compare_folders, in_words, judged
from mucudnn.bench.results.reading import Header, read_folder
from mucudnn.bench.results.writing import Row, open_folder

SPREAD = 0.04  # of the logarithm of a call's time
DISTURBED, DISTURBANCE = 0.08, 0.33  # share of calls, and how much longer they take
SLOW = 4 / 3
_SHORTEST_S, _LONGEST_S = 2.0, 180.0  # of a phase, slow or not


@dataclass(slots=True)
class NoisyMachine:
    """Two shared cores from a moment on. Phases are those of the machine: all calls of a time share them."""

    seed: int
    now_s: float = 0.0
    _is_slow: bool = False
    _until_s: float = 0.0
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self._is_slow = self.random.random() < 0.5

    def call(self, quiet_s: float) -> float:
        """Return how long a call takes, now."""
        while self.now_s >= self._until_s:
            self._is_slow = not self._is_slow
            self._until_s += exp(self.random.uniform(log(_SHORTEST_S), log(_LONGEST_S)))
        took_s = quiet_s * self.random.lognormvariate(0.0, SPREAD)
        took_s *= SLOW if self._is_slow else 1.0
        took_s *= 1 + DISTURBANCE * (self.random.random() < DISTURBED)
        self.now_s += took_s
        return took_s

    def in_turns(self, quiet_s: Mapping[str, float], rounds: int) -> dict[str, list[float]]:
        """Return samples of contestants in turns, each 10 ms or a call, in a random order each round."""
        samples: dict[str, list[float]] = {name: [] for name in quiet_s}
        for _ in range(rounds):
            for name in self.random.sample([*quiet_s], len(quiet_s)):
                samples[name].append(self.call(quiet_s[name]))
        return samples


TOLERANCE = 0.05
ROWS, ROUNDS, REPEATS = 20, 81, 20
HEADER = Header("convolutions", "a network", {}, ENVIRONMENT, ("layer",), ROWS)


@cache
def measured(seed: int, slower: float = 1.0) -> tuple[np.ndarray, ...]:
    """Logarithms of ours over torch's of a run, row by row; ``slower``: what ours takes, over what it should."""
    machine = NoisyMachine(seed)
    rows = []
    for row in range(ROWS):
        torch_s = 0.01 * (1 + row % 5)
        samples = machine.in_turns({"torch": torch_s, "mucudnn": slower * torch_s / 2}, ROUNDS)
        rows.append(np.log(samples["mucudnn"]) - np.log(samples["torch"]))
    return tuple(rows)


def verdicts(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> list[Verdict]:
    pairs = [Pair(a, b, is_controlled=True) for a, b in zip(before, after, strict=True)]
    return [verdict for _, verdict in judged(pairs, TOLERANCE)]


def test_nothing_is_called_faster_or_slower_by_mistake() -> None:
    for repeat in range(REPEATS):
        found = verdicts(measured(2 * repeat), measured(2 * repeat + 1))
        assert set(found) <= {Verdict.SAME, Verdict.UNDECIDED}, repeat


def test_a_slowdown_of_a_tenth_is_found() -> None:
    """It is in two rows of twenty, so that few other rows help to find it."""
    found = []
    for repeat in range(REPEATS):
        quiet, slow = measured(2 * repeat + 1), measured(1000 + repeat, 1.1)
        found += verdicts(measured(2 * repeat), (*slow[:2], *quiet[2:]))[:2]
    assert found.count(Verdict.SLOWER) >= 0.95 * len(found)


def folder(
    path: Path, rows: Mapping[str, Mapping[str, Sequence[float]]], header: Header = HEADER, more: Sequence[Row] = ()
) -> Path:
    with open_folder(path, header) as writer:
        for layer, contestants in rows.items():
            writer.add([Row({"layer": layer}, name, samples) for name, samples in contestants.items()])
        for row in more:
            writer.add([row])
        writer.write_summary()
    return path


def samples(seed: int, torch_s: float = 0.02, ours_s: float = 0.01, rounds: int = 40) -> dict[str, list[float]]:
    machine = np.random.default_rng(seed)
    return {
        name: list(time_s * np.exp(machine.normal(0.0, 0.01, rounds)))
        for name, time_s in (("torch", torch_s), ("mucudnn", ours_s))
    }


def compare(before: Path, after: Path) -> FolderComparison:
    return compare_folders(read_folder(before), read_folder(after), TOLERANCE)


def test_each_row_has_its_verdict(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", {name: samples(i) for i, name in enumerate(("slower", "faster", "same"))})
    ours_s = {"slower": 0.011, "faster": 0.009, "same": 0.01}
    after = folder(tmp_path / "b", {name: samples(9 + i, ours_s=s) for i, (name, s) in enumerate(ours_s.items())})
    comparison = compare(before, after)
    assert {row.before["layer"]: str(row.verdict) for row in comparison.rows} == {n: n for n in ours_s}
    for row in comparison.rows:
        assert row.ratio.low <= row.ratio.value <= row.ratio.high
        assert row.ratio.value == pytest.approx(ours_s[row.before["layer"]] / 0.01, abs=0.01)


def test_a_slow_phase_of_a_whole_run_is_no_slowdown(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", {"conv": samples(1)})
    after = folder(tmp_path / "b", {"conv": samples(2, 0.02 * SLOW, 0.01 * SLOW)})
    assert [row.verdict for row in compare(before, after).rows] == [Verdict.SAME]


def test_without_torch_beside_a_slow_phase_is_allowed_for(tmp_path: Path) -> None:
    def alone(seed: int, time_s: float) -> dict[str, dict[str, list[float]]]:
        return {"conv": {"mucudnn": samples(seed, ours_s=time_s)["mucudnn"]}}

    before = folder(tmp_path / "a", alone(1, 0.01))
    for number, (slowdown, verdict) in enumerate({SLOW: Verdict.UNDECIDED, 1.6: Verdict.SLOWER}.items()):
        after = folder(tmp_path / f"b{number}", alone(2, 0.01 * slowdown))
        (row,) = compare(before, after).rows
        assert (row.verdict, row.is_controlled) == (verdict, False)


def test_another_torch_is_itself_compared(tmp_path: Path) -> None:
    other = replace(HEADER, environment=replace(ENVIRONMENT, torch="another"))
    before = folder(tmp_path / "a", {"conv": samples(1)})
    after = folder(tmp_path / "b", {"conv": samples(2, torch_s=0.01)}, other)
    comparison = compare(before, after)
    found = {row.before["contestant"]: row.verdict for row in comparison.rows}
    assert found == {"torch": Verdict.FASTER, "mucudnn": Verdict.UNDECIDED}
    assert "torch was a torch and is another" in in_words(comparison)


def test_what_only_one_has_is_listed(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", {"conv1": samples(1), "conv2": samples(2)})
    failed = Row({"layer": "conv2"}, "mucudnn", failure="no memory")
    after = folder(tmp_path / "b", {"conv1": samples(3), "conv3": samples(4)}, more=[failed])
    told = in_words(compare(before, after))
    assert f"only in {before}: 1 rows: conv2 mucudnn" in told
    assert f"only in {after}: 1 rows: conv3 mucudnn" in told


def test_the_exit_status_is_1_after_a_slowdown_and_2_without_common_rows(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", {"conv": samples(1)})
    after = folder(tmp_path / "b", {"conv": samples(2, ours_s=0.011)})
    slower, other = invoke("bench", "compare", before, after), folder(tmp_path / "c", {})
    assert (slower.exit_code, "slower" in slower.stdout) == (1, True)
    assert invoke("bench", "compare", after, before).exit_code == 0
    assert invoke("bench", "compare", before, after, "--tolerance", "20%").exit_code == 0
    nothing = invoke("bench", "compare", before, other)
    assert (nothing.exit_code, "only in" in nothing.stdout) == (2, True)
    assert "no row in common; name folders of the same layers" in nothing.stderr
    for wrong in ("5", "-1%", "nan%", "a bit"):
        assert "write for example 5%" in fail("bench", "compare", before, after, "--tolerance", wrong)
