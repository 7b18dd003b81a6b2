"""The proving process: it loads torch once and forks workers that run foreign code and may crash.

``main`` is the program of the process. It receives batches of trials and answers each trial with a proof or an error. A
worker runs one batch after the other. If it dies, the batch is bisected with new workers until the culprit is found,
since a corrupt heap may crash the worker only in a later trial.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import TextIO

from mucudnn.core.errors import UnsoundError, first_line
from mucudnn.kernels.memory import is_out_of_memory
from mucudnn.measuring.proofs import BarredError, Fault, Proof, Trial, UnprovenError
from mucudnn.measuring.proving import trial as trials

IDLE_S = 60.0  # idle time after which the process exits; the next batch starts another

Verdict = Proof | BarredError | UnprovenError
_DONE = "done"


def main(descriptor: int, preload: str) -> None:
    """Answer batches of trials received through a socket, until the client closes it or stays idle.

    The first message says which checks of the heap are active.

    preload: ``LD_PRELOAD`` of processes started from here.
    """
    os.environ["LD_PRELOAD"] = preload
    faulthandler.disable()  # the last line on standard error is the reason of a death
    client = Connection(descriptor)
    server = Server(client)
    client.send(trials.heap_checks())
    try:
        while client.poll(IDLE_S):
            request = client.recv()
            if request:
                client.send(server.prove(request))
            else:
                server.rest()
                client.send(_DONE)
    except (EOFError, OSError):
        pass
    server.rest()


@dataclass(slots=True)
class _Worker:
    """A forked process that runs trials of foreign code.

    errors: the file that captures its standard error.
    """

    pid: int
    connection: Connection
    errors: TextIO

    def end(self) -> str:
        """Kill the worker process and return a description of how it ended."""
        os.kill(self.pid, signal.SIGKILL)
        return self.how_it_ended()

    def how_it_ended(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        self.errors.seek(0)
        said = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        self.errors.close()
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
        return f"{how}, {said[-1]}" if said else how


class Server:
    """Executor of batches of trials in worker processes.

    client: connection to the process that requests the trials.
    """

    def __init__(self, client: Connection) -> None:
        self._client = client
        self._worker: _Worker | None = None

    def prove(self, batch: Sequence[Trial]) -> list[Verdict]:
        """Run a batch of trials in workers, and return a verdict (a proof or an error) for each trial, in order."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(batch):
            verdicts += self._prove(batch[len(verdicts) :])
        return verdicts

    def rest(self) -> None:
        """End the worker process, which frees its memory."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _prove(self, batch: Sequence[Trial]) -> list[Verdict]:
        """Run the batch in a worker; return verdicts (proofs or errors) for one or more of its first trials."""
        is_new = self._worker is None
        worker = self._worker = self._worker or self._fork()
        worker.connection.send(batch)
        verdicts: list[Verdict] = []
        while True:
            running = batch[len(verdicts)] if len(verdicts) < len(batch) else None
            answer = self._answer(worker, 10.0 if running is None else running.bench.limit_s)
            if answer is None:
                self.rest()
                if running is None:
                    return verdicts
                reason = f"it hangs: {running.bench.limit_s:.0f} s were not enough"
                return [*verdicts, BarredError(reason, Fault.HANGS)]
            if answer == _DONE:
                return verdicts
            if isinstance(answer, str):
                self._worker = None
                return self._without_culprit(batch, answer, is_new=is_new)
            verdicts.append(answer)

    def _without_culprit(self, batch: Sequence[Trial], how: str, *, is_new: bool) -> list[Verdict]:
        """Return verdicts after a worker has died: bisect the batch to find the candidate that killed the worker.

        Earlier batches are not suspected, since the heap was checked after each of them.
        """
        if len(batch) > 1:
            half = len(batch) // 2
            first = self.prove(batch[:half])
            self.rest()
            return [*first, *self.prove(batch[half:])]
        if not is_new:
            return self._prove(batch)
        if how.startswith("SIGKILL"):
            return [UnprovenError("the process that proves it was killed, perhaps for lack of memory")]
        return [BarredError(f"it ends the process: {how}", Fault.DIES)]

    def _answer(self, worker: _Worker, most_s: float) -> Verdict | str | None:
        """Return the worker's next message, or a description of its death; None on a timeout of ``most_s`` seconds."""
        ready = wait([worker.connection, self._client], most_s)
        if self._client in ready:  # while a batch runs, the client sends nothing, so it has closed
            self.rest()
            os._exit(0)
        if not ready:
            return None
        try:
            answer: Verdict | str = worker.connection.recv()
        except (EOFError, OSError):
            return worker.how_it_ended()
        return answer

    def _fork(self) -> _Worker:
        here, there = Pipe()
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (the worker's end closes it)
        pid = os.fork()
        if pid:
            there.close()
            return _Worker(pid, here, errors)
        try:
            here.close()
            self._client.close()
            os.dup2(errors.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _work(there)
        except EOFError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _work(connection: Connection) -> None:
    """Run batches of trials in a worker until the connection is closed; send each result before the next trial."""
    while True:
        batch = connection.recv()
        for trial in batch:
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)
            connection.send(_verdict(trial))
        trials.forget()
        connection.send(_DONE)


def _verdict(trial: Trial) -> Verdict:
    try:
        return trials.run(trial)
    except BarredError as error:
        return error
    except Exception as error:
        fault = Fault.WRONG if isinstance(error, UnsoundError) else Fault.FAILS
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        reason = f"{kind}{first_line(error)}"
        return UnprovenError(reason) if is_out_of_memory(error) else BarredError(reason, fault)
