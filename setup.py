"""The compiled algorithms, in builds for different instruction sets, and the extensions of Python.

From source, only the best build for the processor at hand is compiled. Each is optional: without it, mucudnn runs on
torch's operators, and the end of the output (of `pip install -v`), the first tuning and `mucudnn doctor` say so.
Environment variables:

- ``MUCUDNN_BUILDS``: other builds, such as ``avx512,avx2`` or ``all``.
- ``MUCUDNN_PYTHONS``: other interpreters, separated by colons, for which the extensions are compiled too. Everything
  must then compile, and the wheel is one for all of them (``make wheel``).
- ``MUCUDNN_SANITIZE``: all builds for ``make sanitize``: slow, with every memory access checked.

The builds are shared libraries with a C interface (kernels/compiled/library.py), so they do not depend on the version
of Python. They use the OpenMP runtime that torch has loaded and are not linked with another one, since two thread pools
would compete for the cores.
"""

import json
import os
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/compiled")
FLAGS = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-fno-wrapv"]  # Python's own flags have -fwrapv
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if os.environ.get("MUCUDNN_SANITIZE") else []
if SANITIZERS:
    FLAGS += [*SANITIZERS, "-O0", "-g1", "-fno-omit-frame-pointer"]
PYTHONS = os.environ.get("MUCUDNN_PYTHONS", "").split(":") if os.environ.get("MUCUDNN_PYTHONS") else []
IS_OPTIONAL = not PYTHONS
MACHINE = sysconfig.get_platform().rpartition("-")[2]  # another one in cross-compilation (make wheel-aarch64)
IS_X86 = MACHINE == "x86_64"
X86_BUILDS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
# On aarch64 NEON needs no flag: every such processor has it.
BUILDS = {**(X86_BUILDS if IS_X86 else {}), "plain": []}
# x86-64 processors without AVX2 are rare today: they get what computes every problem, and 1x1 filters.
LEFT_OUT = {"plain": ("depthwise", "winograd")} if IS_X86 else {}
PROCESSOR = Path("/proc/cpuinfo")  # of Linux
MISSING: set[str] = set()  # names of extensions that could not be compiled
SUFFIX_MARK = "@"  # in an extension's name, before what Python adds to that of the file


def wanted_builds() -> list[str]:
    """Return the builds that ``MUCUDNN_BUILDS`` names, or the best one for this processor; all if it is not known."""
    named = os.environ.get("MUCUDNN_BUILDS", "")
    if named and named != "all":
        names = [name.strip() for name in named.split(",")]
        if not set(names) <= set(BUILDS):
            raise SystemExit(f"MUCUDNN_BUILDS is {named!r}; allowed are all, or names of {', '.join(BUILDS)}")
        return names
    if named or SANITIZERS or not PROCESSOR.exists():
        return list(BUILDS)
    flags = set(PROCESSOR.read_text().split())
    needed = {name: {option[2:] for option in options if "=" not in option} for name, options in BUILDS.items()}
    return [next(name for name, instructions in needed.items() if instructions <= flags)]


class Build(build_ext):
    """A command that compiles all sources of an extension at once, and those of each extension in a folder of its own.

    Extensions follow one another, so that no more compilers run than there are processors. Names of files are as given:
    nothing of this Python's is added.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/").replace(SUFFIX_MARK, ".") + ".so"

    def build_extension(self, ext: Extension) -> None:
        compile_some, folder = self.compiler.compile, Path(self.build_temp) / ext.name

        def compile_all(sources, output_dir=None, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda one: compile_some([one], output_dir=str(folder), **options), sources)
                return [name for objects in made for name in objects]

        self.compiler.compile = compile_all
        MISSING.add(ext.name)
        try:
            super().build_extension(ext)
            MISSING.remove(ext.name)
        finally:
            self.compiler.compile = compile_some


class Wheel(bdist_wheel):
    """A command that names a wheel for several Pythons after none of them."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, of_platform = super().get_tag()
        return (python, abi, of_platform) if IS_OPTIONAL else ("py3", "none", of_platform)


def build_of(name: str) -> Extension:
    """Return the library that is compiled for one instruction set."""
    sources = [one for one in sorted(SOURCES.rglob("*.cpp")) if one.parent.name not in LEFT_OUT.get(name, ())]
    return Extension(
        f"mucudnn.kernels.compiled._{name}",
        sources=[str(source) for source in sources],
        depends=[str(header) for header in sorted(SOURCES.rglob("*.h"))],
        include_dirs=[str(SOURCES)],
        extra_compile_args=["-fopenmp", *FLAGS, *BUILDS[name]],
        extra_link_args=SANITIZERS,
        optional=IS_OPTIONAL,
    )


def headers_by_suffix() -> dict[str, str]:
    """Return the folder of each interpreter's headers, by what its extensions' file names end with."""
    asked = "import json, sysconfig as s; print(json.dumps([s.get_config_var('EXT_SUFFIX'), s.get_path('include')]))"
    pythons = (sys.executable, *PYTHONS)
    answers = (subprocess.run([one, "-c", asked], check=True, capture_output=True) for one in pythons)
    return dict(json.loads(answer.stdout) for answer in answers)


def extensions_of(suffix: str, include: str) -> list[Extension]:
    """Return the extensions for one interpreter."""
    return [
        Extension(
            f"mucudnn.{name}{SUFFIX_MARK}{suffix.strip('.').removesuffix('.so').replace(platform.machine(), MACHINE)}",
            sources=[f"mucudnn/{name.replace('.', '/')}.cpp"],
            depends=["mucudnn/running/eager/tensors.h", "mucudnn/running/eager/norms.h"],
            include_dirs=[include],
            extra_compile_args=FLAGS,
            extra_link_args=SANITIZERS,
            optional=IS_OPTIONAL,
        )
        for name in ("running.eager._call", "graph._guards")
    ]


RED_ZONES = Extension(  # preloaded into the proving process, never imported
    "mucudnn.measuring.proving._red_zones",
    sources=["mucudnn/measuring/proving/_red_zones.c"],
    extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fvisibility=hidden"],
    optional=IS_OPTIONAL,
)

setup(
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    ext_modules=[
        *(build_of(name) for name in wanted_builds()),
        *(extension for python in headers_by_suffix().items() for extension in extensions_of(*python)),
        RED_ZONES,
    ],
)
if MISSING:
    sys.stderr.write(
        f"\nWARNING: NOT COMPILED, for the reasons above: {', '.join(sorted(MISSING))}.\nmucudnn is installed without "
        "them, and is slower: PyTorch's operators and Python run in their place. Install a C++\ncompiler (g++) and the "
        "headers of Python, then install mucudnn again. `mucudnn doctor` lists what there is.\n\n"
    )
