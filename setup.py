"""The builds of the compiled algorithms: one for each instruction set, the best of which is loaded.

Each build is optional: if it fails, mucudnn runs on torch's operators, and `mucudnn doctor` reports it.
The builds are plain shared libraries with a C interface (kernels/compiled/library.py). They use the OpenMP runtime that
torch has loaded and are not linked with another one, since two thread pools would compete for the cores.
If MUCUDNN_SANITIZE is set, they are built for ``make sanitize``: slow, with every memory access checked.
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
if SANITIZERS:  # -fno-wrapv: with Python's own flags, signed overflow wraps and is not reported
    FLAGS += [*SANITIZERS, "-O0", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer"]
X86_BUILDS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
# On aarch64 NEON needs no flag: every such processor has it.
BUILDS = {"plain": [], **(X86_BUILDS if platform.machine() in ("x86_64", "AMD64") else {})}


class BuildApart(build_ext):
    """A command that compiles extensions in parallel, each in its own folder, since all have the same sources."""

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
