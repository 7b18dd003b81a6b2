"""The builds of the compiled algorithms, one for each instruction set, and the extensions of Python.

From source, only the best build for the processor at hand is compiled. ``MUCUDNN_BUILDS`` names others, such as
``avx512,avx2`` or ``all``. Each is optional: if it fails, mucudnn runs on torch's operators, and `mucudnn doctor`
reports it. The builds are plain shared libraries with a C interface (kernels/compiled/library.py). They use the OpenMP
runtime that torch has loaded and are not linked with another one, since two thread pools would compete for the cores.
If MUCUDNN_SANITIZE is set, they are built for ``make sanitize``: slow, with every memory access checked.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/compiled")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-g0", "-fvisibility=hidden"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if os.environ.get("MUCUDNN_SANITIZE") else []
if SANITIZERS:  # -fno-wrapv: with Python's own flags, signed overflow wraps and is not reported
    FLAGS += [*SANITIZERS, "-O0", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer"]
X86_BUILDS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
# On aarch64 NEON needs no flag: every such processor has it.
BUILDS = {**(X86_BUILDS if platform.machine() in ("x86_64", "AMD64") else {}), "plain": []}
PROCESSOR = Path("/proc/cpuinfo")  # of Linux


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


class BuildInParallel(build_ext):
    """A command that compiles all sources of an extension at once, and those of each extension in a folder of its own.

    Extensions follow one another, so that no more compilers run than there are processors.
    """

    def build_extension(self, ext: Extension) -> None:
        compile_some, folder = self.compiler.compile, Path(self.build_temp) / ext.name

        def compile_all(sources, output_dir=None, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda one: compile_some([one], output_dir=str(folder), **options), sources)
                return [name for objects in made for name in objects]

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_some


def by_size(folder: Path) -> list[str]:
    """Return the sources in a folder, from the one that takes the longest to compile on."""
    first = ("implicit_gemm", "pointwise", "winograd", "depthwise")
    sources = sorted(folder.rglob("*.cpp"))
    return [str(one) for one in sorted(sources, key=lambda one: [*first, one.stem].index(one.stem))]


setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        Extension(
            f"mucudnn.kernels.compiled._{name}",
            sources=by_size(SOURCES),
            depends=[str(header) for header in sorted(SOURCES.rglob("*.h"))],
            include_dirs=[str(SOURCES)],
            extra_compile_args=[*FLAGS, *BUILDS[name]],
            extra_link_args=SANITIZERS,
            optional=True,
        )
        for name in wanted_builds()
    ]
    + [
        *(
            Extension(
                f"mucudnn.{name}",
                sources=[f"mucudnn/{name.replace('.', '/')}.cpp"],
                depends=["mucudnn/running/eager/tensors.h"],
                extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", *SANITIZERS],
                extra_link_args=SANITIZERS,
                optional=True,
            )
            for name in ("running.eager._call", "graph._guards")
        ),
        Extension(  # preloaded into the proving process, never imported
            "mucudnn.measuring.proving._red_zones",
            sources=["mucudnn/measuring/proving/_red_zones.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fvisibility=hidden"],
            optional=True,
        ),
    ],
)
