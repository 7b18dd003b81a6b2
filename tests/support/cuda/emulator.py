"""Compiles CUDA C++ as plain C++ and runs its grid as loops, on CPU tensors: if its threads share nothing."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

COMPILER = shutil.which("g++")

_BEFORE = r"""
#include <cstring>
#include <tuple>
#include <type_traits>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct { unsigned x; } blockIdx, threadIdx;

template <class To, class From>
To copied(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float half_to_float(unsigned short bits) { return copied<_Float16>(bits); }
inline unsigned short float_to_half(float value) { return copied<unsigned short>(_Float16(value)); }
inline unsigned float_bits(float value) { return copied<unsigned>(value); }
inline float float_of_bits(unsigned bits) { return copied<float>(bits); }
"""

_AFTER = r"""
template <class Argument>
Argument take(void* const*& pointers, const int*& sizes) {
  Argument argument;
  if constexpr (std::is_pointer_v<Argument>) {
    argument = static_cast<Argument>(*pointers++);
  } else {
    std::memcpy(&argument, sizes, sizeof argument);
    sizes += sizeof argument / sizeof *sizes;
  }
  return argument;
}

// Whether as many arguments are given as the function takes.
template <class... Arguments>
bool run(void (*function)(Arguments...), unsigned blocks, unsigned threads, void* const* pointers, int pointer_count,
         const int* sizes, int size_count) {
  void* const* next_pointer = pointers;
  const int* next_size = sizes;
  const std::tuple<Arguments...> arguments{take<Arguments>(next_pointer, next_size)...};
  if (next_pointer != pointers + pointer_count || next_size != sizes + size_count) return false;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) std::apply(function, arguments);
  return true;
}
"""

_RUNNER = """
extern "C" bool run_{name}(unsigned blocks, unsigned threads, void* const* pointers, int pointer_count,
                           const int* sizes, int size_count) {{
  return run({name}, blocks, threads, pointers, pointer_count, sizes, size_count);
}}
"""


@dataclass(eq=False)
class EmulatedLauncher:
    """In the place of ``CupyLauncher``. launched: the names of the functions, as they are started."""

    launched: list[str] = field(default_factory=list)

    def probe(self) -> str | None:
        return None

    def launch(
        self,
        source: str,
        function: str,
        grid_blocks: int,
        block_threads: int,
        pointers: Sequence[int],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        assert device.type == "cpu"
        assert grid_blocks < 2**31
        self.launched.append(function)
        arguments = ((ctypes.c_void_p * len(pointers))(*pointers), len(pointers))
        fields = ((ctypes.c_int * len(sizes))(*sizes), len(sizes))
        run = getattr(_library(source), f"run_{function}")
        run.restype = ctypes.c_bool
        assert run(grid_blocks, block_threads, *arguments, *fields), f"{function} takes other arguments"


@cache
def _library(source: str) -> ctypes.CDLL:
    functions = re.findall(r"^FUNCTION (\w+)\(", source, re.MULTILINE)
    runners = "".join(_RUNNER.format(name=name) for name in functions)
    with TemporaryDirectory() as folder:
        path = Path(folder, "emulated.cpp")
        path.write_text(_BEFORE + source + _AFTER + runners)
        library = path.with_suffix(".so")
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-o", library, path]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
