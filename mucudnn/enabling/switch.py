"""``enable``, ``disable`` and ``tuned``: the config that counts now, and torch's wrappers while there is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mucudnn.enabling import running
from mucudnn.enabling.session import Session
from mucudnn.enabling.status import Status
from mucudnn.running.dispatcher import Wrapper, pop, push
from mucudnn.words.config import Config, config_or_default
from mucudnn.words.errors import InvalidInputError


def enable(config: Config | None = None) -> None:
    """Tune every convolution that torch computes from now on, on the CPU or a GPU, when it is first met.

    No module is touched, and no sample input is needed: subclasses of ``torch.nn.Conv2d``, functional calls,
    convolutions of one dimension and transposed ones are tuned, in training and inference, with ``torch.compile``,
    autocast and ``torch.func``. The first call of a size may take as long as ``config.first_call_time``; what the
    database has is not measured again. It holds for the process, and each process of a group tunes for itself. Called
    again, the new config counts. ``status()`` tells what became of it, ``disable()`` ends it.

    Raises ``InvalidInputError`` for a workspace budget or the headroom, which need a whole model, and for an unknown
    algorithm; ``DatabaseError`` for a file that cannot be read; ``UnavailableError`` for a torch that is too old, or
    where another package has replaced its convolution.

    >>> import mucudnn
    >>> mucudnn.enable(mucudnn.Config(workspace_limit="32MiB"))
    >>> mucudnn.disable()
    """
    session = _session(config)
    _state.switch(session, _state.nested)


def disable() -> None:
    """End what ``enable`` began: torch's own convolutions run again. Enabled anew, it knows what was tuned before."""
    _state.switch(None, _state.nested)


@contextmanager
def tuned(config: Config | None = None) -> Iterator[None]:
    """Do inside what ``enable`` does, for the whole process. Nested, the innermost config counts, here and there.

    Raises what ``enable`` raises.

    >>> import torch, mucudnn
    >>> with mucudnn.tuned(mucudnn.Config(first_call_time="10ms")):
    ...     torch.nn.functional.conv2d(torch.zeros(4, 3, 8, 8), torch.zeros(6, 3, 3, 3)).shape
    torch.Size([4, 6, 6, 6])
    """
    session = _session(config)
    _state.begin(session)
    try:
        yield
    finally:
        _state.end(session)


def status() -> Status:
    """Tell what was tuned under the config that counts now or counted last, why, and what it gained."""
    return Status() if _state.last is None else _state.last.status()


class _State:
    """State of the switch. last: the session that counts, or that counted last."""

    def __init__(self) -> None:
        self.enabled: Session | None = None
        self.nested: tuple[Session, ...] = ()
        self.last: Session | None = None
        self.wrapper: Wrapper | None = None

    def begin(self, session: Session) -> None:
        with _switching:
            self.switch(self.enabled, (*self.nested, session))

    def end(self, session: Session) -> None:
        """End the last one of this session: threads may end theirs in another order."""
        with _switching:
            index = len(self.nested) - 1 - self.nested[::-1].index(session)
            self.switch(self.enabled, (*self.nested[:index], *self.nested[index + 1 :]))

    def switch(self, enabled: Session | None, nested: tuple[Session, ...]) -> None:
        """Have the wrappers of the session that counts, and no others. Nothing has changed where that fails."""
        with _switching:
            current = nested[-1] if nested else enabled
            wrapper = None
            if current is not None:
                wrapper = Wrapper(partial(running.forward, current), partial(running.backward, current))
                push(wrapper)
                self.last = current
            if self.wrapper is not None:
                pop(self.wrapper)
            self.wrapper, self.enabled, self.nested = wrapper, enabled, nested


_switching = threading.RLock()
_state = _State()
_sessions: dict[Config, Session] = {}  # what was tuned is not forgotten where a config comes again


def _session(config: Config | None) -> Session:
    config = config_or_default(config)
    if config.workspace_budget_bytes is not None:
        raise InvalidInputError(
            f"workspace_budget is {config.workspace_budget!r}, and is divided over a model: use mucudnn.optimize, or "
            "give a workspace_limit for each convolution"
        )
    with _switching:
        if config not in _sessions:
            session = Session(config)
            session.workshop.check()
            _sessions[config] = session
        return _sessions[config]
