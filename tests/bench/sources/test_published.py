"""Published times of DeepBench, as the file that the project ships has them."""

from __future__ import annotations

from mucudnn.bench.sources.published import GEOMETRY, published_times


def test_every_machine_has_its_times_in_seconds() -> None:
    times = published_times()
    assert set(times["machine"]) == {"V100 float32", "V100 float16", "P100 float32", "KNL7250 float32"}
    first = times[(times[list(GEOMETRY)] == [4, 1, 161, 700, 32, 5, 20, 0, 0, 2, 2]).all(axis=1)]
    v100 = first[first["machine"] == "V100 float32"].set_index("operation")["time_s"]
    assert dict(v100) == {"forward": 0.078e-3, "backward_filter": 0.127e-3}  # backward data was not published


def test_what_was_published_twice_is_there_once() -> None:
    times = published_times()
    assert not times.duplicated([*GEOMETRY, "operation", "machine"]).any()
    assert (times["time_s"] > 0).all()
