"""Pages of the site that lie beside docs/: README.md, CONTRIBUTING.md and CHANGELOG.md, with their links turned."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<=\]\()([^)#:]+)")  # the path in [text](path#anchor), where it is no address


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_seen_from_docs, text)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turn links from docs/ to the files beside it."""
    return _LINK.sub(lambda link: PAGES.get(link[1].removeprefix("../"), link[1]), markdown)


def _seen_from_docs(link: re.Match[str]) -> str:
    """``docs/memory.md`` -> ``memory.md``, ``CHANGELOG.md`` -> ``changelog.md``."""
    return PAGES.get(link[1], link[1].removeprefix("docs/"))
