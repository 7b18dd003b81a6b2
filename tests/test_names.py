"""Names in the source are nouns, and what a call means can be read where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent
FILES = sorted(path for folder in ("mucudnn", "kernels", "solver", "bench") for path in (SOURCE / folder).rglob("*.py"))
PRONOUNS = {
    *("one", "of", "it", "this", "that", "these", "those", "who", "what", "such", "some", "both", "each", "every"),
    *("other", "others", "own", "ours", "theirs", "found", "made", "given", "known", "again", "rest", "more", "much"),
    "most",
}


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def is_pronoun(name: str) -> bool:
    words = name.strip("_").split("_")
    return words[0] == "of" or (len(words) == 1 and words[0] in PRONOUNS)


def test_names_are_nouns() -> None:
    """At most 6 % of the names that the graph binds are pronouns, and 4 % of all."""
    names = {path: [*bound_names(ast.parse(path.read_text()))] for path in FILES}
    for folder, most in ((SOURCE / "mucudnn" / "graph", 0.06), (SOURCE, 0.04)):
        bound = [name for path, in_file in names.items() if path.is_relative_to(folder) for name in in_file]
        assert sum(map(is_pronoun, bound)) <= most * len(bound), folder


def test_what_is_passed_can_be_read() -> None:
    """Booleans are given by name, and no arguments are unpacked from a literal only so that lines fit."""
    unclear = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name != "train":  # of torch's modules
                hints = [argument.annotation for argument in (*node.args.posonlyargs, *node.args.args)]
                is_unclear = any(isinstance(hint, ast.Name) and hint.id == "bool" for hint in hints)
            elif isinstance(node, ast.Call):
                starred = (arg.value for arg in node.args if isinstance(arg, ast.Starred))
                is_unclear = any(isinstance(value, (ast.Tuple, ast.List)) for value in starred)
            else:
                continue
            if is_unclear:
                unclear.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not unclear
