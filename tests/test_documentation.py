"""The documentation: links that work, lines that fit, and names that the code has: of Python, commands, files, targets.

What stands in backquotes or between fences is code, and the code is asked about it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shlex
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import commands
from torch import nn

import mucudnn
import mucudnn.testing
from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES
from mucudnn.core.config import SETTINGS, unknown_variables
from mucudnn.kernels.algorithm import BaseAlgorithm
from mucudnn.optimizing.confirm import Confirmation

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
FOLDERS = ("mucudnn", "bench", "kernels", "solver", "examples")
each_page = pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])

# Not ours, and not in what is imported of torch or Python: of the C library, allocators, other programs and readers
FOREIGN = {
    *("M_MMAP_MAX", "MADV_HUGEPAGE", "MALLOC_CONF", "THP_MEM_ALLOC_ENABLE", "OMP_PROC_BIND", "hugetlb", "tcmalloc"),
    *("oversize_threshold", "dirty_decay_ms", "muzzy_decay_ms", "libjemalloc", "libtcmalloc_minimal", "libjemalloc2"),
    *("CUDNN_ERRATA_JSON_FILE", "TORCH_CUDNN_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "AutoencoderKLLTXVideo", "whl"),
    *("__setattr__", "net", "fn", "PID", "FOLDER", "Special", "TunedSpecial", "UNet", "TunedConv2dBackward"),
}
FOREIGN_OPTIONS = {"--help", "--nproc-per-node", "--max-restarts", "--epochs", "--index-url"}
# Of modules that torch imports when they are asked for
TORCHS = ("ao.quantization", "ao.quantization.quantize_fx", "fx.experimental.proxy_tensor", "nn.utils.prune")
TORCHS += ("nn.utils.fusion", "optim.swa_utils", "distributed.optim", "distributed.fsdp", "utils.flop_counter")
USERS_FILES = ("train.py", "file.py", "model.py", "mine.toml", "package", "build", "own", "results", "gpu-results", "/")


def text_of(page: Path) -> str:
    """Return a page without what the changelog says of things that are gone."""
    return page.read_text().partition("\nWhat went since")[0]


def fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of what stands between fences."""
    yield from re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Return what stands in backquotes, as single lines."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@each_page
def test_links_lead_to_headings_of_files_of_the_repository(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("https://"):
            path = page.parent / target if target else page
            assert path.is_file(), target
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in map(slug, titles), f"{target}#{anchor}"


@each_page
def test_prose_has_at_most_120_columns(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    shown = re.findall(r"^::: mucudnn\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    others = ["distributed.SynchronousModelAveraging", *(f"testing.{name}" for name in mucudnn.testing.__all__)]
    assert sorted(shown) == sorted([*mucudnn.__all__, *others])
    described = " ".join(inspect.getdoc(getattr(mucudnn, name)) or "" for name in mucudnn.__all__)
    raised = {*re.findall(r"``(\w+(?:Error|Interrupted))``", described)} - {*dir(builtins)}
    assert raised <= {*mucudnn.__all__}, "what docstrings promise to raise can be caught"


# Commands, their options, variables and targets


@cache
def options_of() -> dict[str, set[str]]:
    """Return the options of each command by its name, such as ``bench convolutions``."""
    return {
        name.removeprefix("mucudnn "): {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        for name, command in commands()
    }


def shell_lines(text: str) -> Iterator[str]:
    for language, block in fences(text):
        yield from () if language in ("python", "toml") else block.replace("\\\n", " ").splitlines()
    yield from spans(text)


def wrong_in_command(words: list[str]) -> Iterator[str]:
    """Yield the command, or its options, behind ``mucudnn`` that do not exist."""
    every = options_of()
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in every), None)
    groups = {one.split()[0] for one in every if " " in one}
    if name is None:
        if words and words[0] not in ("--help", "--version") and words not in ([group] for group in groups):
            yield " ".join(words)
        return
    for word in words[len(name.split()) :]:
        if name == "run" and not word.startswith("-") and not re.fullmatch(r"\d+\w*", word):
            return  # all further words are the program's
        if word.startswith("--") and word.partition("=")[0] not in every[name] | FOREIGN_OPTIONS:
            yield f"{name} {word}"


@each_page
def test_commands_options_variables_and_targets_exist(page: Path) -> None:
    text, wrong = text_of(page), []
    every = set[str]().union(*options_of().values()) | FOREIGN_OPTIONS
    every |= {
        option for file in (ROOT / "examples").rglob("*.py") for option in re.findall(r"--[a-z-]+", file.read_text())
    }
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in shell_lines(text):
        code = line.partition(" #")[0]
        if (start := re.search(r"(?<![\w/.'-])mucudnn(?= [a-z-])", code)) and "import mucudnn" not in code:
            wrong += wrong_in_command(shlex.split(code[start.end() :]))
        else:
            wrong += (option for option in re.findall(r"(?<!\S)--[a-z-]+", code) if option not in every)
        if made := re.match(r"(?:MUCUDNN_\w+=\S+ )?make((?: [a-z0-9-]+)+)", code):
            wrong += (f"make {name}" for name in made[1].split() if name not in targets)
    named = re.findall(r"\bMUCUDNN_[A-Z_]*[A-Z]", text)
    known = [one.removeprefix("--").replace("-", "_") for one in every]
    assert [*wrong, *unknown_variables(dict.fromkeys(named, ""), known)] == []


def test_the_page_of_commands_names_every_command_network_and_table() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert set(spans(text)) >= {*NETWORKS, *TABLES}
    shown = re.findall(r"^\| `([^`]*)`", text, re.MULTILINE)
    groups = {name.split()[0] for name in options_of() if " " in name}
    for name in options_of():
        assert any(f"mucudnn {name}" in one for one in shown) or name.split()[-1] in spans(text), name
    assert groups == {"bench", "database"}


# Python


def python_of(text: str) -> Iterator[ast.Module]:
    for language, block in fences(text):
        if language == "python":
            yield ast.parse(block)
    for code in spans(text):
        if "Config(" in code or "mucudnn." in code:
            try:
                yield ast.parse(code)
            except SyntaxError:  # of a shell, or an excerpt
                continue


def found_by(name: str) -> Any:
    """Return what a dotted name such as ``mucudnn.testing.check_algorithm`` stands for.

    Raises ``AttributeError`` or ``ImportError`` if there is no such thing.
    """
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for number, part in enumerate(rest):
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(".".join((first, *rest[: number + 1])))
        found = getattr(found, part)
    return found


def wrong_in_python(tree: ast.Module) -> Iterator[str]:
    """Yield names of mucudnn that do not exist, and arguments that its functions do not take."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif (
            isinstance(node, ast.Call) and (name := ast.unparse(node.func).removeprefix("mucudnn.")) in mucudnn.__all__
        ):
            taken = inspect.signature(getattr(mucudnn, name)).parameters
            yield from (f"{name}({one.arg})" for one in node.keywords if one.arg and one.arg not in taken)
        for name in names:
            if re.fullmatch(r"mucudnn(\.\w+)+", name):
                try:
                    found_by(name)
                except (AttributeError, ImportError):
                    yield name


@each_page
def test_python_names_what_mucudnn_has(page: Path) -> None:
    groups = {"mucudnn.algorithms"}  # of entry points
    assert {wrong for tree in python_of(text_of(page)) for wrong in wrong_in_python(tree)} <= groups


# All other names: of attributes, columns, keys, files


@cache
def names_in(folder: str) -> frozenset[str]:
    """Return identifiers and words of short strings of the sources in a folder, but for docstrings and comments."""
    found = set[str]()
    for path in (ROOT / folder).rglob("*.*"):
        if path.suffix in (".py", ".cpp", ".h", ".c", ".cu", ".toml"):
            prose = r"(?s:\"{3}.*?\"{3})|#.*" if path.suffix == ".py" else r"//.*"
            found.update(re.findall(r"\w+", re.sub(prose, "", path.read_text())))
    return frozenset(found)


@cache
def names_elsewhere() -> frozenset[str]:
    """Return names of torch and Python, of files and targets of the repository, and of tables in tests."""
    with warnings.catch_warnings(action="ignore"):
        for name in TORCHS:
            importlib.import_module(f"torch.{name}")
    modules = [
        vars(one) for name, one in sys.modules.items() if name.split(".")[0] in ("torch", "builtins", "enum", "signal")
    ]
    found = set().union(*modules, dir(nn.Module), dir(torch.Tensor), dir(dict), dir(str), sys.stdlib_module_names)
    found |= {part for name in sys.modules for part in name.split(".")}
    for kind in (torch.load, nn.parallel.DistributedDataParallel, nn.SyncBatchNorm):
        found |= {*dir(kind), *inspect.signature(kind).parameters}
    tracked = [path for folder in (*FOLDERS, "tests", "docs") for path in (ROOT / folder).rglob("*")]
    found |= {part for path in (*tracked, *ROOT.iterdir()) for part in re.findall(r"\w+", path.name)}
    found |= set(re.findall(r"^(?:([a-z-]+):|\w+ \?= )", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / "setup.py", *(ROOT / "tests").rglob("*.py")):
        found.update(re.findall(r"^[A-Z_]+\b", path.read_text(), re.MULTILINE))
    return frozenset(found | FOREIGN | set().union(*map(names_in, FOLDERS)))


@each_page
def test_names_in_backquotes_are_names_of_the_code(page: Path) -> None:
    """Identifiers with their attributes; words that are parts of a text with hyphens are no identifiers."""
    unknown = {
        name
        for code in spans(text_of(page))
        for name in re.findall(r"(?<![\w/*-])[A-Za-z_]\w{2,}(?![\w/-])", code)
        if name not in names_elsewhere() and not name.startswith("MUCUDNN_")
    }
    assert unknown == set()


def attributes(kind: Any) -> set[str]:
    """Return the public attributes of a class, or of the items of a tuple of it."""
    kinds = [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type)]
    return {name for one in kinds for name in (*dir(one), *inspect.get_annotations(one)) if not name.startswith("_")}


def parameters(kind: type) -> set[str]:
    """Return the parameters of the methods of a class."""
    methods = [method for _, method in inspect.getmembers(kind, inspect.isfunction)]
    return {name for method in methods for name in inspect.signature(method).parameters}


# What the names in the first column of a table are, by page and title
TABLES_OF_NAMES = {
    ("report.md", "attribute"): attributes(Confirmation),
    ("CONTRIBUTING.md", "member"): attributes(BaseAlgorithm) | parameters(BaseAlgorithm) | {"name", "version"},
    ("report.md", "row"): names_in("mucudnn/store"),
    ("benchmarks.md", "column"): names_in("bench"),
    ("benchmarks.md", "key"): names_in("bench"),
    ("commands.md", "setting"): {*SETTINGS},
    ("benchmarks.md", "file"): names_in("bench") | {"json", "jsonl"},
}


@each_page
def test_tables_name_what_there_is(page: Path) -> None:
    for title, body in re.findall(r"^\| ([a-z]+) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        rows = [[spans(cell) for cell in row.split("|")[1:-1]] for row in body.splitlines()]
        if not any(re.fullmatch(r"[a-z]\w+(\(.*\))?", name) for first, *_ in rows for name in first):
            continue
        if (page.name, title) not in TABLES_OF_NAMES:
            assert title in ("what", "command", "algorithm", "module", "call", "part"), (
                f"of what is the table of each {title}?"
            )
            continue
        known = TABLES_OF_NAMES[page.name, title]
        for first, *others in rows:
            named = {name for code in first for name in re.findall(r"\w+", code)}
            assert named <= known, named - known
            if known == attributes(Confirmation):  # what the attribute has, or is computed of
                kinds = [typing.get_type_hints(Confirmation).get(name) for name in first]
                known_here = known.union(*map(attributes, kinds))
                assert {name for cell in others for name in cell} <= known_here, first


def files_named_like(pattern: str) -> Iterable[Path]:
    path = pattern.rstrip("/")
    every = [ROOT.glob(path), *((ROOT / folder).rglob(path) for folder in (*FOLDERS, "tests", "docs"))]
    return (found for one in every for found in one)


@each_page
def test_files_are_there(page: Path) -> None:
    codes = spans(text_of(page))
    if page.name == "architecture.md":
        codes += (word.rstrip(",") for _, block in fences(text_of(page)) for word in block.split())
    endings = r"[\w*/.-]+\.(?:py|cpp|cu|h|sh|md)"
    named = {word for code in codes for word in code.split() if re.fullmatch(rf"(?:{endings})|[a-z_]+/[\w/-]*", word)}
    unknown = {word for word in named if not word.startswith(USERS_FILES) and not any(files_named_like(word))}
    assert unknown == set()
