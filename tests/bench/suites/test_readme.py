"""README's figures: the record of what other benchmarks measured, its table, and the file that README quotes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import invoke
from support.places import TESTS

from mucudnn.bench.sources.published import README_FILE
from mucudnn.bench.suites import readme


def line(contestant: str, samples_s: list[float], **columns: Any) -> dict[str, Any]:
    return {"contestant": contestant, "samples_s": samples_s, "failure": None, "load": None, **columns}


LINES = (
    [
        *(line("torch", [2.0, 3.0, 9.0], count=2), line("undivided", [9.0, 9.0], count=2)),
        *(line("mucudnn", [1.0, 1.5], count=2), line("torch", [1.0, 1.0], count=1, load=0.1)),
        line("mucudnn", [3.0, 0.5], count=1),
    ],
    [line("torch", [1.0, 1.0], peak_bytes=200), line("mucudnn", [2.0, 2.0], peak_bytes=100)],
    [line("torch", [4.0]), line("mucudnn", [1.0])],
    [line("torch", [1.0, 1.0], peak_bytes=200), line("mucudnn", []) | {"failure": "it was killed"}],
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each benchmark has written lines into its folder."""
    for name in ("benchmark_convolutions", "benchmark_training", "benchmark_budgets", "compare_runtimes"):
        monkeypatch.setattr(readme, name, lambda *_, **__: None)
    monkeypatch.setattr(readme, "read_folder", lambda path: SimpleNamespace(lines=LINES[int(path.name)]))
    monkeypatch.setattr(readme, "NETWORK", "alexnet")  # random weights of which take a moment


@pytest.mark.usefixtures("measured")
def test_rows_sum_what_is_there_several_times_and_say_what_failed() -> None:
    convolutions, step, image, within = readme.measured_readme(None)["rows"]
    # In each round every layer counts as often as it occurs; what is undivided does not count.
    assert (convolutions["torch_samples_s"], convolutions["mucudnn_samples_s"]) == ([5.0, 7.0], [5.0, 3.5])
    assert convolutions["speedup"] == pytest.approx(6.0 / 4.25)
    assert (convolutions["load"], convolutions["torch_peak_bytes"]) == (0.1, None)
    assert (step["speedup"], step["noise"], step["mucudnn_peak_bytes"]) == (0.5, 0.0, 100)
    assert within == {"title": within["title"], "failure": "mucudnn: it was killed"}
    assert image["speedup"] == 4.0


@pytest.mark.usefixtures("measured")
def test_the_command_prints_ratios_above_and_below_one_alike_and_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = invoke("bench", "readme", "--json", out)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert {"processor", "environment", "mucudnn", "python", "date", "took_s"} <= {*record}
    heres = ("1.41 ± ", "0.50 ± 0.00", "4.00 ± ", "mucudnn: it was killed")
    for quoted, here in zip(readme.published_readme()["rows"], heres, strict=True):
        (shown,) = (text for text in result.output.splitlines() if text.startswith(f"│ {quoted['title']} "))
        assert here in shown
        assert f"{quoted['speedup']:.2f}" in shown
    assert str(out) in result.output.replace("\n", "")


def test_readme_quotes_the_newest_file() -> None:
    stored = sorted((TESTS.parent / "docs" / "results").glob("readme-*.json"))
    records = [json.loads(path.read_text()) for path in stored]
    newest = max(records, key=lambda record: str(record["date"]))
    assert readme.published_readme() == newest
    assert README_FILE.resolve() in stored
    text = (TESTS.parent / "README.md").read_text()
    assert newest["date"][:10] in text
    assert newest["processor"] in text
    for row in newest["rows"]:
        times = f"{row['torch_s'] * 1e3:.0f} ms | {row['mucudnn_s'] * 1e3:.0f} ms"
        assert f"| {row['title']} | {times} | {row['speedup']:.2f} ± {row['noise']:.2f} |" in text


@pytest.mark.usefixtures("measured")
def test_what_is_not_begun_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RUN_LIMIT_S", -1.0)
    assert all(row["failure"].startswith("not begun") for row in readme.measured_readme(None)["rows"])
