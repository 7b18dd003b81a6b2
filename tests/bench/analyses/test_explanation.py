"""What is told of a divided budget, where the right answer is known."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from support.problems.stored_costs import MIB, TABLE, Stored
from support.snapshots import assert_as_stored

from mucudnn.bench.analyses.explanation import Explanation, explain, explanation_record, explanation_table, write_tables
from mucudnn.bench.sources.table_tuning import of_table, table_tasks
from mucudnn.tuning.replay import replay
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation


def explained(budget: str) -> Explanation:
    config = Config(workspace_budget=budget, operations=(Operation.FORWARD,))
    return explain(of_table(TABLE, replay(table_tasks(TABLE, config), config, Stored())))


def test_each_layer_says_what_it_got_and_what_the_next_faster_needs() -> None:
    one, two = explained("110MiB").rows
    assert (one["chosen"], one["next_faster"], one["extra_bytes"], one["saved_s"]) == ("large 8", None, 0, 0)  # twice
    assert (two["chosen"], two["next_faster"], two["extra_bytes"]) == ("small 8", "large 8", 90 * MIB)
    assert two["saved_s"] == pytest.approx(0.03, rel=0.01)


def test_the_curve_has_the_budget_on_it_and_falls() -> None:
    explanation = explained("111MiB")
    points = {p.budget_bytes: p.time_s for p in explanation.curve.points}
    assert points[111 * MIB] == pytest.approx(2 * 0.05 + 0.08, rel=0.01)
    assert points[0] == pytest.approx(0.3, rel=0.01)
    assert points[200 * MIB] == pytest.approx(0.15, rel=0.01)
    assert list(points.values()) == sorted(points.values(), reverse=True)


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_the_table_the_files_and_the_record_agree(tmp_path: Path) -> None:
    explanation = explained("110MiB")
    assert_as_stored("explain-budget", explanation_table(explanation))
    record = json.loads(json.dumps(explanation_record(explanation)))
    write_tables(explanation, tmp_path / "memory.csv")
    rows = lines_of(tmp_path / "memory.csv")
    assert [row["chosen"] for row in rows] == [row["chosen"] for row in record["problems"]] == ["large 8", "small 8"]
    assert [int(row["extra_bytes"]) for row in rows] == [0, 90 * MIB]
    points = lines_of(tmp_path / "memory-curve.csv")
    assert [float(p["time_s"]) for p in points] == [p["time_s"] for p in record["curve"]["points"]]


def test_without_a_budget_there_is_nothing_to_explain() -> None:
    config = Config(operations=(Operation.FORWARD,))
    tuning = of_table(TABLE, replay(table_tasks(TABLE, config), config, Stored()))
    with pytest.raises(InvalidInputError, match="no workspace budget"):
        explain(tuning)
