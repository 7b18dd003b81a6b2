"""Client of the proving process, which runs foreign code first: starts the process when needed, and sends requests."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # the rule of multiprocessing
from typing import BinaryIO

import torch

from mucudnn.core.errors import first_line, raise_interruption, tolerated
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import package_of
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import MALLOC_DEBUG, Bench, Proof, Trial, UnprovenError

_SLOWEST_FLOPS_PER_S = 1e8  # half the rate of oneDNN's reference loops on one core
_SLOW_FLOPS_PER_S = 5e9  # of one thread: a twentieth of the rate of our own algorithms
_LEAST_SLOW_S = 0.1
_START_S = 60.0  # loading torch takes one to ten seconds
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; import warnings; warnings.simplefilter('ignore'); "
    "from mucudnn.measuring.proving.server import main; main({fd}, {preload!r})"
)


class Prover:
    """Client of a proving process, which it starts for the first batch of candidates and restarts if it has ended.

    The client is thread-safe. A forked child starts its own proving process.

    least_limit_s: timeout of a candidate in seconds, to which the time of its arithmetic at the rate of the slowest
    known loops is added.
    """

    def __init__(self, least_limit_s: float = 10.0) -> None:
        self._least_limit_s = least_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0
        self._checks: dict[str, bool] | None = None  # of its heap; None until the process is ready
        self._lock = threading.Lock()

    def prove(
        self,
        candidates: Sequence[Candidate],
        batch_size: int,
        device: str,
        *,
        has_bias: bool = True,
        waits: bool = True,
    ) -> list[Proof | Exception]:
        """Run candidates in the proving process; return for each its proof, or the error that forbids running it here.

        The error is a ``BarredError`` if the candidate failed and would fail again, and an ``UnprovenError`` if it
        could not be tested: the process cannot be started, memory is short, or the algorithm cannot be pickled.

        has_bias: whether a bias is added to y.
        waits: whether to wait for a process that is not ready yet; otherwise nothing is proven by then.
        """
        if not candidates:
            return []
        bench = self._bench(candidates[0].problem, batch_size, device, has_bias=has_bias)
        trials = [_trial_or_error(bench, candidate) for candidate in candidates]
        batch = [trial for trial in trials if isinstance(trial, Trial)]
        try:
            with self._lock:
                if not waits and not self._is_ready():
                    raise OSError("the process is not ready yet")
                verdicts = iter(self._ask(batch) if batch else ())
        except (OSError, EOFError, subprocess.SubprocessError) as error:
            raise_interruption(error)
            return [_unproven(error) for _ in candidates]
        return [next(verdicts) if isinstance(trial, Trial) else trial for trial in trials]

    def start(self, *, waits: bool = True) -> None:
        """Start the proving process; ignore a failure, which ``prove`` reports. waits: whether until it is ready."""
        with self._lock, tolerated(OSError, EOFError):
            self._begin()
            if waits:
                self._ready()

    def heap_checks(self) -> dict[str, bool]:
        """Start the proving process and return which checks of its heap are active there, by their names.

        Raises ``OSError`` if the process cannot be started.
        """
        with self._lock:
            self._begin()
            return self._ready()[1]

    def rest(self) -> None:
        """Tell the process to free the memory that it keeps for further candidates of the same problem."""
        with self._lock:
            if self._connection is not None and self._owner == os.getpid() and self._checks is not None:
                try:
                    self._connection.send(())
                    self._connection.recv()
                except (OSError, EOFError) as error:
                    self.close()
                    raise_interruption(error)

    def close(self) -> None:
        """End the proving process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _bench(self, problem: ConvProblem, batch_size: int, device: str, *, has_bias: bool) -> Bench:
        limit_s = self._least_limit_s + problem.flops(batch_size) / _SLOWEST_FLOPS_PER_S
        threads, deterministic = torch.get_num_threads(), TorchSettings.current().deterministic
        bench = Bench(problem, batch_size, device, threads, deterministic, limit_s, has_bias)
        if device != "cpu" or problem.item_bytes >= 4:
            return bench
        return replace(bench, slow_s=max(_LEAST_SLOW_S, problem.flops(batch_size) / (_SLOW_FLOPS_PER_S * threads)))

    def _ask(self, batch: Sequence[Trial]) -> list[Proof | Exception]:
        """Send a batch to the process and return the answers; retry once if the process had already ended."""
        for is_last in (False, True):
            try:
                self._begin()
                connection, _ = self._ready()
                connection.send(batch)
                verdicts: list[Proof | Exception] = connection.recv()
                return verdicts
            except (OSError, EOFError) as error:
                self.close()
                raise_interruption(error)
                if is_last:
                    raise
            except BaseException:  # it is still busy with the batch
                self.close()
                raise
        raise AssertionError

    def _begin(self) -> None:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        self.close()
        if not sys.executable:
            raise OSError("the path of the Python interpreter is not known")
        client, server = socket.socketpair()
        with server, open_red_zones() as red_zones:
            preload = os.environ.get("LD_PRELOAD", "")
            program = _PROGRAM.format(path=sys.path, fd=server.fileno(), preload=preload)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *_args_from_interpreter_flags(), "-c", program],
                    pass_fds=(server.fileno(), red_zones.fileno()),
                    env=checked_environment(red_zones),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                client.close()
                raise
        self._connection, self._owner, self._checks = Connection(client.detach()), os.getpid(), None

    def _is_ready(self) -> bool:
        self._begin()
        return self._checks is not None or (self._connection is not None and self._connection.poll(0))

    def _ready(self) -> tuple[Connection, dict[str, bool]]:
        """Wait until the process is ready; return the connection to it, and the checks of its heap."""
        assert self._connection is not None
        if self._checks is None:
            if not self._connection.poll(_START_S):
                raise OSError(f"the process did not start within {_START_S:.0f} s")
            self._checks = self._connection.recv()
        return self._connection, self._checks


@cache
def prover() -> Prover:
    """Return the ``Prover`` that all code in this process shares; it is closed when this process exits."""
    shared = Prover()
    atexit.register(shared.close)
    return shared


def _trial_or_error(bench: Bench, candidate: Candidate) -> Trial | UnprovenError:
    """Return the request to send to the process, or an error if an algorithm of another package cannot be sent."""
    name, pickled = candidate.algorithm.name, None
    if package_of(name) is not None or candidate.algorithm != algorithm(name, bench.device):
        import cloudpickle  # pickles classes of scripts and notebooks with their code

        try:
            pickled = cloudpickle.dumps(candidate.algorithm)
        except Exception as error:
            raise_interruption(error)
            return _unproven(error)
    return Trial(bench, name, candidate.micro_batch_size, pickled)


def _unproven(error: Exception) -> UnprovenError:
    return UnprovenError(f"it could not be proven in a process of its own: {first_line(error)}")


def open_red_zones() -> BinaryIO:
    """Open the compiled red-zone library; an empty file if it is missing, as in an installation without a compiler."""
    spec = find_spec("mucudnn.measuring.proving._red_zones")
    return Path(os.devnull if spec is None or spec.origin is None else spec.origin).open("rb")


def checked_environment(red_zones: BinaryIO) -> dict[str, str]:
    """Return this process's environment variables, with red zones and glibc's heap checks switched on.

    The library of red zones is named by its descriptor, which the process must inherit: ``LD_PRELOAD`` is split at
    spaces and colons, which a path may have. What cannot be loaded is left out, as on systems without glibc. Libraries
    already in ``LD_PRELOAD`` are kept after ours, except that AddressSanitizer must come first.
    """
    checked = f"/proc/self/fd/{red_zones.fileno()}"
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    preloaded.insert(len(preloaded) if any("libasan" in name for name in preloaded) else 0, checked)
    checks = {"MALLOC_CHECK_": "3", "LIBC_FATAL_STDERR_": "1", "MUCUDNN_ENABLE": "0"}
    kept = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # fresh pages are slow
    return {**os.environ, **checks, **kept, "LD_PRELOAD": ":".join([*preloaded, MALLOC_DEBUG])}
