"""The compiled algorithms: the same sources once for each instruction set, the best one chosen when they are loaded.

Each build is optional: where it fails, mucudnn runs on torch's operators, and `mucudnn doctor` says so.
The builds are plain shared libraries with a C interface (kernels/compiled/library.py); they use the OpenMP runtime that
torch has loaded, so they are not linked with one of their own: two thread pools would fight for the cores.
With MUCUDNN_SANITIZE in the environment they are built for ``make sanitize``: slow, and every access checked.
"""

import copy
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/compiled")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-g0", "-fvisibility=hidden"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if os.environ.get("MUCUDNN_SANITIZE") else []
if SANITIZERS:  # -fno-wrapv: Python's own flags let signed sums wrap, so that nothing would be reported
    FLAGS += [*SANITIZERS, "-O0", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer"]
X86_BUILDS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
# On aarch64 the compiler needs no flag for NEON: every such processor has it.
BUILDS = {"plain": [], **(X86_BUILDS if platform.machine() in ("x86_64", "AMD64") else {})}


class BuildApart(build_ext):
    """Compiles extensions in parallel, each into a folder of its own: the builds have the same sources."""

    def build_extension(self, ext: Extension) -> None:
        apart = copy.copy(self)
        apart.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(apart, ext)


setup(
    cmdclass={"build_ext": BuildApart},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=[
        Extension(
            f"mucudnn.kernels.compiled._{name}",
            sources=[str(source) for source in sorted(SOURCES.rglob("*.cpp"))],
            depends=[str(header) for header in sorted(SOURCES.rglob("*.h"))],
            include_dirs=[str(SOURCES)],
            extra_compile_args=[*FLAGS, *instruction_set],
            extra_link_args=SANITIZERS,
            optional=True,
        )
        for name, instruction_set in BUILDS.items()
    ]
    + [
        Extension(
            "mucudnn.running.eager._call",
            sources=["mucudnn/running/eager/_call.cpp"],
            extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", *SANITIZERS],
            extra_link_args=SANITIZERS,
            optional=True,
        ),
        Extension(  # preloaded into the proving process, never imported
            "mucudnn.measuring.proving._red_zones",
            sources=["mucudnn/measuring/proving/_red_zones.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fvisibility=hidden"],
            optional=True,
        ),
    ],
)
