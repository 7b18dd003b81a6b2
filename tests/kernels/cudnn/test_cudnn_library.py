"""Finding and loading libcudnn, its errors, and the lifetime and content of descriptors; on a fake library."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cudnn.library import BAD_PARAM, FakeCudnn, Function

from mucudnn.core.errors import MucudnnError, UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.cudnn import library as module
from mucudnn.kernels.cudnn.descriptor import Attribute, Descriptor, DescriptorKind, operation_graph
from mucudnn.kernels.cudnn.library import CudnnError, Library, library

Loader = Callable[[dict[str, object]], list[str]]


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """Puts these files in ctypes' reach, and no others; gives the list of what is asked for."""

    def use(files: dict[str, object]) -> list[str]:
        asked: list[str] = []

        def load(path: str) -> object:
            asked.append(path)
            if path not in files:
                raise OSError(f"{path}: cannot open shared object file")
            return files[path]

        monkeypatch.setattr(ctypes, "CDLL", load)
        return asked

    return use


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place without any cuDNN: nothing mapped, no package, no variable; the file of mappings."""
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 42   /lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0 \n")
    monkeypatch.setattr(module, "_MAPS", maps)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.delenv("MUCUDNN_LIBCUDNN", raising=False)
    library.cache_clear()
    yield maps
    library.cache_clear()


PARTS = {f"libcudnn_{part}.so.9": object() for part in module._PARTS}
OTHERS = {"libcublasLt.so.13": object(), **PARTS}


def test_what_is_mapped_comes_before_the_variable(
    nowhere: Path, loading: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere.write_text(nowhere.read_text() + "7f04-7f05 r-xp 0 08:01 43   /site packages/lib/libcudnn.so.9\n")
    monkeypatch.setenv("MUCUDNN_LIBCUDNN", "/mine/libcudnn.so.9")
    loading({"/site packages/lib/libcudnn.so.9": FakeCudnn(), "/mine/libcudnn.so.9": FakeCudnn(), **OTHERS})
    assert library().path == "/site packages/lib/libcudnn.so.9"


def test_the_variable_comes_before_package_and_system(
    nowhere: Path, loading: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nvidia" / "cudnn"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libcudnn.so.9").touch()
    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(package)]))
    of_package = str(package / "lib" / "libcudnn.so.9")
    loading({name: FakeCudnn() for name in (of_package, "/mine/libcudnn.so.9", "libcudnn.so.9")} | OTHERS)
    assert library().path == of_package
    library.cache_clear()
    monkeypatch.setenv("MUCUDNN_LIBCUDNN", "/mine/libcudnn.so.9")
    assert library().path == "/mine/libcudnn.so.9"


def test_no_library_says_how_to_get_one(nowhere: Path, loading: Loader) -> None:
    loading({})
    with pytest.raises(UnavailableError, match=r"no cuDNN: .*pip install nvidia-cudnn-cu13.*MUCUDNN_LIBCUDNN"):
        library()


@pytest.mark.parametrize(("version", "text"), [(8907, "8.9.7"), (7605, "7.6.5")])
def test_an_old_library_is_refused_with_its_version(loading: Loader, version: int, text: str) -> None:
    loading({"libcudnn.so.8": FakeCudnn(version=version), **OTHERS})
    with pytest.raises(UnavailableError, match=rf"is cuDNN {text}; mucudnn needs 9\.0 or later"):
        Library("libcudnn.so.8")


def test_without_cublaslt_it_says_so_rather_than_letting_cudnn_abort(loading: Loader) -> None:
    cudnn = FakeCudnn()
    loading({"/n/cudnn/lib/libcudnn.so.9": cudnn, **PARTS})
    with pytest.raises(UnavailableError, match=r"needs libcublasLt\.so\.13.*pip install nvidia-cublas"):
        Library("/n/cudnn/lib/libcudnn.so.9")
    assert not cudnn.calls


@pytest.mark.parametrize("missing", PARTS)
def test_a_part_that_is_missing_is_named_before_cudnn_aborts_for_it(loading: Loader, missing: str) -> None:
    """Even to tell its version it needs them."""
    cudnn = FakeCudnn()
    cudnn.cudnnGetVersion = Function(lambda: pytest.fail("cuDNN would have aborted"))  # type: ignore[arg-type]
    loading({"/n/libcudnn.so.9": cudnn, **{name: part for name, part in OTHERS.items() if name != missing}})
    with pytest.raises(UnavailableError, match=rf"/n/libcudnn\.so\.9 lacks its part {missing}: .*--force-reinstall"):
        Library("/n/libcudnn.so.9")


def test_a_failed_call_tells_what_which_and_why(loading: Loader) -> None:
    cudnn = FakeCudnn()
    loading({"a": cudnn, **OTHERS})
    cudnn.refused["cudnnSetStream"] = (BAD_PARAM, b"stream is of another device")
    with pytest.raises(CudnnError) as caught:
        Library("a").call("cudnnSetStream", "set the stream", None, None)
    assert str(caught.value) == "cuDNN: set the stream: CUDNN_STATUS_BAD_PARAM: stream is of another device"
    assert (caught.value.status, caught.value.is_unsupported) == (BAD_PARAM, False)
    assert isinstance(caught.value, MucudnnError)


# Descriptors: what is set and read, in which C types, how long they live; and the graphs that are made of them.


PROBLEM = ConvProblem(Operation.FORWARD, 4, 9, 8, 6, 3, 2, (2, 1), (1, 0), (1, 2), 2)


def loaded(cudnn: FakeCudnn) -> Library:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: cudnn)
        return Library("fake")


def content(cudnn: FakeCudnn, kind: DescriptorKind) -> list[dict[int, list[object]]]:
    return [made.content for made in cudnn.made if made.kind == kind]


def test_what_is_referred_to_lives_as_long_and_no_longer() -> None:
    cudnn = FakeCudnn()
    library = loaded(cudnn)
    operation = Descriptor(library, DescriptorKind.OPERATION_CONVOLUTION_FORWARD).finalize()
    graph = Descriptor(library, DescriptorKind.OPERATIONGRAPH).set(Attribute.OPERATIONGRAPH_OPS, operation)
    seen = weakref.ref(operation)
    del operation
    assert seen() is not None
    assert len(cudnn.alive) == 2
    del graph
    gc.collect()
    assert seen() is None
    assert not cudnn.alive


@given(
    c=st.integers(1, 9),
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
    n=st.integers(1, 24),
)
def test_slices_are_aligned_as_declared_where_executables_place_them(
    c: int, h: int, w: int, dtype: str, n: int
) -> None:
    cudnn = FakeCudnn()
    problem = ConvProblem(Operation.FORWARD, c, h, w, 3, 1, 1, dtype=dtype)
    operation_graph(loaded(cudnn), problem, n)
    power = n & -n  # slices of n samples begin at its multiples: see test_executable.py
    for made in content(cudnn, DescriptorKind.TENSOR):
        (uid,), (alignment,) = made[Attribute.TENSOR_UNIQUE_ID], made[Attribute.TENSOR_BYTE_ALIGNMENT]
        sample_bytes = 0 if uid == 2 else prod((c, h, w) if uid == 1 else (3, h, w)) * problem.item_bytes
        starts = [place * power * sample_bytes for place in range(17)]
        assert all(start % alignment == 0 for start in starts)  # type: ignore[operator]
        assert alignment == 16 or any(start % (2 * alignment) for start in starts)  # type: ignore[operator]
