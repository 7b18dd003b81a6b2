"""How long filters are kept, and by whom: copies, pickles, threads, and memory that is given back."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from support.problems.kept_layers import fresh, images, layer
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.kernels.compiled import library
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running.executable import Executable
from mucudnn.running.filter_cache import FilterCache

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is kept")


def bytes_in_use(module: mucudnn.Conv2d) -> int:
    assert module.filter_cache is not None
    return sum(buffer.nbytes for _, buffer in module.filter_cache._prepared.values())


def used() -> mucudnn.Conv2d:
    module = layer()
    with torch.no_grad():
        module(images())
    assert bytes_in_use(module) > 0
    return module


def through_torch_save(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_memory_is_given_back_by_train_release_workspaces_and_the_end_of_the_module() -> None:
    module, x = used(), images()
    assert bytes_in_use(module.eval()) > 0
    for give_back in (lambda model: model.train().eval(), lambda model: mucudnn.release_workspaces()):
        give_back(nn.Sequential(module))
        assert bytes_in_use(module) == 0
        with torch.no_grad():
            assert torch.equal(module(x), fresh(module, x))
        assert bytes_in_use(module) > 0
    buffers = [weakref.ref(buffer) for _, buffer in cast(FilterCache, module.filter_cache)._prepared.values()]
    del module
    gc.collect()
    assert [buffer() for buffer in buffers] == [None]


def test_copies_know_what_to_keep_and_prepare_it_themselves() -> None:
    module, x = used(), images()
    assert list(module.state_dict()) == ["weight", "bias"]
    assert len(pickle.dumps(module)) == len(pickle.dumps(copy.deepcopy(module))), "nothing prepared is in a pickle"
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), through_torch_save):
        other = copied(module)
        assert other.cached_filters == module.cached_filters != ()
        assert bytes_in_use(other) == 0
        with torch.no_grad():
            other.weight.mul_(2)
            assert torch.equal(other(x), fresh(other, x))
            assert torch.equal(module(x), fresh(module, x))
    (text, _) = map(str, module.cached_filters)
    for part in ("kept for forward 4x8x8 -> 6", "winograd-4x4", "1000 B", "batch 3 runs winograd-4x4 3"):
        assert part in text


def test_threads_share_one_preparation(preparations: list[Executable], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(), images()
    prepare = Executable.prepare

    def slow(executable: Executable, w: Tensor) -> Tensor:
        time.sleep(0.05)
        return prepare(executable, w)

    monkeypatch.setattr(Executable, "prepare", slow)
    expected, together = fresh(module, x), threading.Barrier(4)

    def call() -> list[bool]:
        together.wait()
        with torch.no_grad():  # of each thread
            return [torch.equal(module(x), expected) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call) for _ in range(4)]
        assert all(all(done.result()) for done in calls)
    assert len(preparations) == 1


def test_threads_that_release_and_exchange_the_weight_meanwhile_disturb_no_result() -> None:
    """Every weight is one of two tensors, whole: so must be every result."""
    module, x = layer(), images()
    weights = [nn.Parameter(torch.randn_like(module.weight)) for _ in range(2)]
    expected = [fresh(module, x, w) for w in weights]
    module.weight = weights[0]
    calling = True

    def call() -> bool:
        right = True
        with torch.no_grad():
            while calling:
                y = module(x)
                right = right and any(torch.equal(y, one) for one in expected)
        return right

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call) for _ in range(3)]
        for i in range(200):
            module.weight = weights[i % 2]
            if i % 5 == 0:
                mucudnn.release_workspaces()
        calling = False
        assert all(done.result() for done in calls)


@pytest.mark.parametrize("where", ["before the copy", "after the preparation"])
def test_what_is_prepared_while_the_weight_is_written_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module, x = layer(), images()
    first, second = torch.randn(2, *module.weight.shape)
    module.weight.data.copy_(first)
    owner, name = (FilterCache, "_prepare") if where == "before the copy" else (Executable, "prepare")
    uninterrupted = getattr(owner, name)

    def interrupted(*args: Any) -> Any:  # as by another thread
        if where == "before the copy":
            module.weight.data.copy_(second)
        result = uninterrupted(*args)
        module.weight.data.copy_(second)
        return result

    with torch.no_grad():
        monkeypatch.setattr(owner, name, interrupted)
        module(x)
        monkeypatch.setattr(owner, name, uninterrupted)
        for w in (first, second) if where == "before the copy" else (second, first):
            module.weight.data.copy_(w)
            assert torch.equal(module(x), fresh(module, x))


def test_another_number_of_threads_prepares_again(preparations: list[Executable]) -> None:
    module, x = layer(), images()
    with torch.no_grad():
        for threads in (1, 2, 2, 1):
            torch.set_num_threads(threads)
            assert torch.equal(module(x), fresh(module, x))
    assert len(preparations) == 3


def test_where_nothing_is_compiled_nothing_is_kept(
    preparations: list[Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_path", lambda build: None)
    loaded_build.cache_clear()
    try:
        module, x = layer(), images()
        with torch.no_grad():
            assert torch.equal(module(x), F.conv2d(x, module.weight, module.bias, padding=1))
    finally:
        loaded_build.cache_clear()
    assert preparations == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_off_while_a_thread_prepares_can_prepare() -> None:
    """The thread that holds the lock is not in the child, and will never give it back."""
    module = layer()
    assert module.filter_cache is not None
    with module.filter_cache._preparing:
        child = os.fork()
        if child == 0:
            os._exit(int(not module.filter_cache._preparing.acquire(timeout=5)))
        assert os.waitpid(child, 0)[1] == 0
