"""Says in words what is wrong with a user's own model: what happened, where in its file, and what to do."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mucudnn.words.errors import InvalidInputError, MucudnnError, first_line

_SHAPE = "--input gives the shape of one sample, as 3x224x224"


@contextmanager
def blamed_in_building(source: str) -> Iterator[None]:
    """Blame errors on the function that makes the model. Raises ``InvalidInputError``, from its cause."""
    with _blamed(source, "cannot be built", "name a function that needs no arguments and returns a torch.nn.Module"):
        yield


@contextmanager
def blamed_in_computing(source: str, shape: Sequence[int]) -> Iterator[None]:
    """Blame errors on the model's forward pass. shape: of its input. Raises ``InvalidInputError``, from its cause."""
    with _blamed(source, f"cannot compute an input of {_product(shape)}", _SHAPE):
        yield


@contextmanager
def blamed_in_training(source: str, shape: Sequence[int]) -> Iterator[None]:
    """Blame errors on a training step. shape: (N, C, H, W) of its input. Raises ``InvalidInputError``, from its cause.

    Errors of mucudnn pass.
    """
    what, advice = f"cannot be trained on an input of {_product(shape)}", f"{_SHAPE}, --batch their number"
    with _blamed(source, what, advice, passing=MucudnnError):
        yield


@contextmanager
def _blamed(source: str, what: str, advice: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Blame errors on the source, and keep their cause: the user's code can raise anything."""
    try:
        yield
    except passing:
        raise
    except MucudnnError as error:
        raise InvalidInputError(f"{source} {what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InvalidInputError(f"{source} {what}: {_told(source, error)}; {advice}") from error


def _told(source: str, error: BaseException) -> str:
    """Say what happened, and where in the model's own file."""
    happened = f"it ended with exit status {error.code}" if isinstance(error, SystemExit) else first_line(error)
    line = _line_of(source, error)
    place = type(error).__name__ if line is None else f"{type(error).__name__} in {line}"
    return f"{happened} ({place})"


def _line_of(source: str, error: BaseException) -> str | None:
    """Return file and line that ran last in the model's own file; None: the error came from elsewhere."""
    place = source.rpartition(":")[0]
    module = sys.modules.get(place)
    file = place if place.endswith(".py") else getattr(module, "__file__", None)
    if file is None:
        return None
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == Path(file).resolve()
    ]
    return f"{Path(file).name}, line {lines[-1]}" if lines else None


def _product(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
