"""The watch over the load: what counts as disturbed, over which span, and how long is waited for quiet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clock.shared_machine import SharedProcessors

from mucudnn.core.records import BUSY
from mucudnn.measuring.load import Load, Watch, too_many_threads, watch_of


def load_of(processors: SharedProcessors, seconds: float, **changes: float) -> Load:
    """The load of a span in which this process worked."""
    watch = processors.watch()
    mark = watch.mark()
    processors.work(seconds, **changes)
    return watch.since(mark)


@pytest.mark.parametrize(
    ("cores", "threads", "others", "expected"),
    [
        (2, 2, 0.0, 0.0),
        (2, 2, 0.7, 0.7),
        (2, 2, 1.6, 1.0),  # of one core, which is enough to keep all waiting
        (64, 64, 0.5, 0.5),
        (64, 8, 50.0, 0.0),  # on cores that nobody here needs
        (64, 8, 56.5, 0.5),
        (2, 4, 0.3, 0.3),
    ],
)
def test_what_others_take_beyond_idle_cores_counts(cores: int, threads: int, others: float, expected: float) -> None:
    found = load_of(SharedProcessors(cores, threads), 2.0, others=others)
    assert found.share == pytest.approx(expected)
    assert found.is_quiet is (expected <= BUSY)


def test_a_span_has_what_happened_in_it_and_not_before() -> None:
    processors = SharedProcessors()
    watch = processors.watch()
    processors.work(5.0, others=1.0)
    mark = watch.mark()
    processors.work(3.0, others=0.0)
    processors.work(1.0, others=0.4)
    assert watch.since(mark).others_share == pytest.approx(0.1)


def test_a_short_span_is_judged_with_what_was_just_before() -> None:
    """Since ticks of 10 ms tell nothing of some milliseconds."""
    processors = SharedProcessors()
    watch = processors.watch()
    for _ in range(100):
        processors.work(0.1, others=0.0)
        watch.mark()
    processors.work(0.5, others=0.5)
    mark = watch.mark()
    processors.work(0.03, others=0.0)
    assert watch.since(mark).others_share == pytest.approx(0.25 / 0.53)


def test_what_was_long_ago_says_nothing_of_now() -> None:
    processors = SharedProcessors()
    watch = processors.watch()
    processors.work(1.0, others=1.0)
    watch.mark()
    processors.rest(100.0)
    assert watch.current().share is None


def test_a_first_short_span_is_unknown() -> None:
    found = load_of(SharedProcessors(), 0.1, others=1.0)
    assert found.share is None
    assert found.is_quiet


def test_what_is_unknown_is_no_load() -> None:
    processors = SharedProcessors()
    watch = Watch(lambda: replace(processors.use(), busy_s=None, throttled_s=None), clock=processors.now)
    mark = watch.mark()
    processors.work(2.0, others=1.0)
    assert watch.since(mark) == Load()
    assert str(Load()) == "unknown"
    assert Watch().current() == Load()
    assert Watch().shortage() is None


def test_the_limit_of_a_container_counts() -> None:
    found = load_of(SharedProcessors(), 2.0, throttled=0.4)
    assert found == Load(others_share=0.0, throttled_share=pytest.approx(0.4))
    assert str(found) == "a quota stops it 40% of the time"


def test_the_largest_part_is_the_load() -> None:
    assert Load(0.1, 0.3).share == 0.3
    assert Load(0.4, 0.3).share == 0.4
    assert str(Load(0.3, 0.2)).count(",") == 1
    assert str(Load(0.1, 0.1)) == "quiet"


def test_it_waits_until_it_is_quiet_and_says_why() -> None:
    processors = SharedProcessors(quiet_from_s=3.0, others=1.0)
    watch, told = processors.watch(), list[str]()
    processors.work(1.0)
    waited_s = watch.wait(told.append, 60.0)
    assert 2.0 <= waited_s <= 3.0
    assert told[0] == "waiting for a quiet machine: others take 100% of a core"
    assert watch.wait(told.append, 60.0) == 0.0


def test_it_waits_no_longer_than_it_may() -> None:
    processors = SharedProcessors(others=1.0)
    watch = processors.watch()
    processors.work(1.0)
    assert watch.wait(lambda text: None, 2.0) == 2.0
    assert not watch.current().is_quiet
    assert watch.wait(lambda text: None, 0.0) == 0.0


@pytest.mark.parametrize(
    ("threads", "cores", "most"),
    [(1, 1.0, None), (2, 2.0, None), (2, 1.5, None), (3, 1.5, 2), (1, 0.5, None), (2, 0.5, 1), (64, 4.0, 4)],
)
def test_more_threads_than_cores_are_told_with_the_remedy(threads: int, cores: float, most: int | None) -> None:
    told = too_many_threads(threads, cores)
    assert (told is None) is (most is None)
    if told is not None:
        assert f"torch uses {threads} threads" in told
        assert f"torch.set_num_threads({most})" in told
        assert f"OMP_NUM_THREADS={most}" in told


def test_the_watch_tells_of_too_many_threads() -> None:
    assert "may use 1.5 cores" in str(SharedProcessors(threads=4).watch(cores=lambda: 1.5).shortage())
    assert SharedProcessors(threads=2).watch(cores=lambda: 2.0).shortage() is None


def test_nothing_is_watched_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_WATCH", "0")
    watch = watch_of("cpu")
    assert watch.since(watch.mark()) == Load()
    monkeypatch.delenv("MUCUDNN_WATCH")
    assert watch_of("cpu").shortage() is None or "cores" in str(watch_of("cpu").shortage())
