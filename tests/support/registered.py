"""What is registered of ours in torch's dispatcher."""

from collections.abc import Iterator
from contextlib import contextmanager

from mucudnn.running import dispatcher


@contextmanager
def no_wrapper_left() -> Iterator[None]:
    """Begin with torch's own kernels, which other threads, as of pytest-xdist, keep from coming back."""
    if dispatcher._libraries:
        dispatcher._uninstall()
    yield
    assert not dispatcher._wrappers
