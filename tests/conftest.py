"""What every test gets: a fixed seed, one thread and a database of its own. Where tests of a GPU run, and why not."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from support.cudnn.backend import FakeBackend
from support.effort import how_many
from support.places import TESTS
from support.ranks.group import Ranks

from mucudnn.core.errors import first_line
from mucudnn.kernels import registry
from mucudnn.measuring import clocks
from mucudnn.optimizing import confirm

# Other processes unpickle functions of tests as parts of ``tests``. At the end: ``make sanitize`` has its own mucudnn.
sys.path.append(str(TESTS.parent))
with suppress(ModuleNotFoundError):  # make gpu does without it
    from hypothesis import settings

    # A busy machine takes its time.
    settings.register_profile("any machine", deadline=None, max_examples=how_many(30, 100))
    settings.load_profile("any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests stop processes by it
pytest.register_assert_rewrite("support.snapshots")  # so that a difference is shown


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20181001)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread, for speed on small shapes; a test that wants more sets the number, and it is set back.

    ``MUCUDNN_TEST_THREADS`` is another number, with which ``support.machines`` runs some of the files.
    """
    count = int(os.environ.get("MUCUDNN_TEST_THREADS", "1"))
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    """Nothing compiled is left for the next test: torch counts what it compiles of a function, and ends at a limit."""
    yield
    if "torch._dynamo" in sys.modules:  # slow to import
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for measurements, so that no test sees the user's."""
    path = tmp_path / "measurements.sqlite"
    monkeypatch.setenv("MUCUDNN_DATABASE", str(path))
    return path


# Nobody watches how busy the machine is: what is measured in tests needs no quiet, and warnings are errors. Not in a
# fixture: those of modules tune before it.
os.environ["MUCUDNN_WATCH"] = "0"
# No test asserts a time, and writing as much memory as the caches hold takes most of a measurement.
clocks._LEAST_BYTES = clocks._MOST_BYTES = 2**20


@pytest.fixture(autouse=True)
def unconfirmed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is confirmed without being asked for: steps of tests are short, and torch's own would run in most."""
    if "confirm" not in request.module.__name__:
        monkeypatch.setattr(confirm, "_is_one_of_several", lambda: True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Mapping[int, Ranks]]:
    """Groups of two and of three ranks, each started by the first test that needs it."""
    groups = {2: Ranks(2), 3: Ranks(3)}
    yield groups
    for group in groups.values():
        group.close()


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what the imports of torch and of the tests have made."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()) is not None:
        pytest.skip(reason)


@lru_cache(maxsize=1)
def why_no_gpu() -> str | None:
    """What is missing for tests marked ``gpu``; ``None``: nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except RuntimeError as error:  # tells no driver, one that is too old, and no device apart
        return f"torch can use no GPU: {first_line(error)}"
    return "torch finds no GPU: see nvidia-smi"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A test that asks for it runs on a GPU, and on the CPU with a stand-in for cuDNN, which finds plain mistakes."""
    if request.param == "cpu":
        backend = FakeBackend()
        monkeypatch.setattr(registry, "cudnn_backend", lambda: backend)
    return str(request.param)
