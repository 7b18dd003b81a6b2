"""``enable``, ``disable``, ``tuned`` and ``status``, which switch the tuning of all convolutions on and off.

For unchanged programs ``enable`` is called when the program imports torch, so this module does not load torch itself.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mucudnn.core.config import Config, config_or_default, without_cache_budget
from mucudnn.core.errors import InvalidInputError, MucudnnError, warn

if TYPE_CHECKING:
    from mucudnn.enabling.session import Session
    from mucudnn.enabling.status import Status
    from mucudnn.running.dispatcher import Wrapper


def enable(config: Config | None = None) -> None:
    """Tune the convolutions that torch computes from now on, on the CPU or a GPU, once they have taken long enough.

    No module is changed, and no sample input is needed: subclasses of ``torch.nn.Conv2d``, functional calls, 1-D and
    transposed convolutions are tuned, in training and inference, with ``torch.compile``, autocast and ``torch.func``.
    A layer is tuned, in one of its calls, once they have taken as long as tuning is expected to: a second or
    ``config.time_limit``, which also limits the tuning, later what tunings took. Stored results are used from the first
    call on. This affects the whole process, and each process of a group tunes for itself. Another call of ``enable``
    replaces the config. ``mucudnn.status()`` returns the choices, and ``disable()`` ends the tuning; a heap that is
    kept (``config.keep_heap``) stays kept.

    Raises ``InvalidInputError`` for a workspace budget or the headroom, which need a whole model, for
    ``batch_invariant``, and for an unknown algorithm; ``DatabaseError`` if the database cannot be read;
    ``UnavailableError`` if torch is too old or another package has replaced its convolution.

    >>> import mucudnn
    >>> mucudnn.enable(mucudnn.Config(workspace_limit="32MiB"))
    >>> mucudnn.disable()
    """
    session = _session(config)
    _state.switch(session, _state.nested)


def disable() -> None:
    """Stop tuning, and run torch's convolutions again. Tuned choices are kept in case ``enable`` is called again."""
    _state.switch(None, _state.nested)


@contextmanager
def tuned(config: Config | None = None) -> Iterator[None]:
    """Tune convolutions as ``enable`` does, but only inside the block. In nested blocks, the innermost config is used.

    All threads of the process are affected.

    Raises the errors of ``enable``.

    >>> import torch, mucudnn
    >>> with mucudnn.tuned(mucudnn.Config(time_limit="10ms")):
    ...     torch.nn.functional.conv2d(torch.zeros(4, 3, 8, 8), torch.zeros(6, 3, 3, 3)).shape
    torch.Size([4, 6, 6, 6])
    """
    with _state.nesting(_session(config)):
        yield


def status() -> Status:
    """Return the choices under the active (or else the last active) config, with reasons and the time saved."""
    from mucudnn.enabling.status import Status

    return Status() if _state.last is None else _state.last.status()


class _State:
    """State of the switch: which sessions (tunings under one config) are active.

    enabled: the session of ``enable``.
    nested: those of ``tuned`` blocks, the innermost last.
    last: the active session, or the last active one.
    wrapper: what wraps torch's kernels for the active session.
    """

    def __init__(self) -> None:
        self.enabled: Session | None = None
        self.nested: tuple[Session, ...] = ()
        self.last: Session | None = None
        self.wrapper: Wrapper | None = None

    @contextmanager
    def nesting(self, session: Session) -> Iterator[None]:
        """Make a session the active one in the block; at the end, another thread's block inside it stays active."""
        with _switching:
            self.switch(self.enabled, (*self.nested, session))
        try:
            yield
        finally:
            with _switching:
                index = len(self.nested) - 1 - self.nested[::-1].index(session)
                self.switch(self.enabled, (*self.nested[:index], *self.nested[index + 1 :]))

    def switch(self, enabled: Session | None, nested: tuple[Session, ...]) -> None:
        """Wrap torch's kernels for the new active session, and unwrap the previous one; on failure change nothing."""
        from mucudnn.running.dispatcher import Wrapper, pop, push

        with _switching:
            current = nested[-1] if nested else enabled
            wrapper = None
            if current is not None:
                wrapper = Wrapper(current.forward, current.backward)
                push(wrapper)
                self.last = current
            if self.wrapper is not None:
                pop(self.wrapper)
            self.wrapper, self.enabled, self.nested = wrapper, enabled, nested


_switching = threading.RLock()
_state = _State()
_sessions: dict[Config, Session] = {}  # kept, so that a config that is used again finds its choices


def _session(config: Config | None) -> Session:
    from mucudnn.enabling.session import Session
    from mucudnn.measuring.heap import settle_heap

    config = without_cache_budget(config_or_default(config))
    if config.workspace_budget_bytes is not None:
        raise InvalidInputError(
            f"workspace_budget is {config.workspace_budget!r}, which is divided over a whole model: use "
            "mucudnn.optimize, or give a workspace_limit for each convolution"
        )
    if config.batch_invariant:
        raise InvalidInputError(
            "batch_invariant is a setting of optimize: enable chooses for each batch size by itself, so leave it out"
        )
    settle_heap(config.keep_heap)
    with _switching:
        if config not in _sessions:
            session = Session(config)
            session.workshop.check()
            _sessions[config] = session
        return _sessions[config]


def enable_with_torch(make_config: Callable[[], Config]) -> None:
    """Call ``enable`` as soon as torch is imported: now, or when the program imports it.

    Until then torch is not loaded, so the program may still set the environment that torch reads. If ``enable`` raises
    an error of mucudnn, the program runs with torch's convolutions, with a warning.
    """
    if "torch" in sys.modules:
        _enable(make_config)
    else:
        sys.meta_path.insert(0, _OnImport(lambda: _enable(make_config)))


def not_with_torch() -> None:
    """Undo ``enable_with_torch`` before torch is imported, in this process and the processes that it starts."""
    os.environ["MUCUDNN_ENABLE"] = "0"
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)]


def _enable(make_config: Callable[[], Config]) -> None:
    collects = gc.isenabled()
    gc.disable()  # an import makes no garbage, and torch has a million objects to search
    try:
        import mucudnn.enabling.session  # noqa: F401
    finally:
        if collects:
            gc.enable()
    try:
        enable(make_config())
    except MucudnnError as error:
        warn(f"mucudnn is not enabled: {error}", RuntimeWarning)


class _OnImport(MetaPathFinder):
    """Import finder for torch that calls a function once torch is loaded, and removes itself."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                self.then()

            loader.exec_module = execute_then
        return spec
