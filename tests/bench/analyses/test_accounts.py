"""The accounts of a tuning add up, and say what was solved from what."""

from __future__ import annotations

import json

import pytest
from support.problems.stored_costs import TABLE, Stored

from mucudnn.bench.analyses.tuning_report import account_in_words, tuning_record
from mucudnn.bench.sources.table_tuning import TableTuning, of_table, table_tasks
from mucudnn.tuning.replay import replay
from mucudnn.words.config import Config
from mucudnn.words.problem import Operation


def tuning(**bounds: object) -> TableTuning:
    config = Config(operations=(Operation.FORWARD,), **bounds)  # type: ignore[arg-type]
    return of_table(TABLE, replay(table_tasks(TABLE, config), config, Stored()))


def test_under_a_limit_each_problem_has_an_account() -> None:
    found = tuning(workspace_limit="10MiB")
    one, two = (row.tuned.account for row in found.rows)
    assert one is not None
    assert two is not None
    assert [str(account.configuration) for account in (one, two)] == ["small 8", "small 8"]
    assert (one.measurements, one.front_size, one.gap) == (3, 3, 0.0)
    text = account_in_words(found)
    assert (
        "2 problems, each solved under its own limit: 240 ms by prediction, optimal" in text
    )  # the first occurs twice
    assert "6 desirable configurations from 6 measurements" in text
    record = json.loads(json.dumps(tuning_record(found)))
    assert [account["objective_s"] for account in record["accounts"]] == pytest.approx([0.08, 0.08])
    assert record["division"] is None


def test_a_divided_budget_has_one_account() -> None:
    found = tuning(workspace_budget="110MiB")
    assert found.divided is not None
    assert account_in_words(found) == str(found.divided.division)
    record = json.loads(json.dumps(tuning_record(found)))
    assert record["accounts"] is None
    assert record["division"]["status"] == "optimal"
