"""Tables of a page of a report, read as a browser reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass(slots=True)
class FoundTable:
    """A table: titles of its columns, after their groups, and the texts of its rows."""

    groups: list[tuple[str, int]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def records(self) -> list[dict[str, str]]:
        """Rows by ``group: title``."""
        groups = [group for group, width in self.groups for _ in range(width)]
        names = [f"{group}: {title}" for group, title in zip(groups, self.titles, strict=True)]
        assert len(set(names)) == len(names)
        return [dict(zip(names, row, strict=True)) for row in self.rows]


class PageParser(HTMLParser):
    """Finds the tables by the identity of their headings, all text, and all elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, FoundTable] = {}
        self.text = ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._heading = self._part = ""
        self._cell: list[str] | None = None
        self._width = 1
        self.feed(page)

    def loose_ends(self) -> list[str]:
        """Names that are there twice, references that lead nowhere, and addresses of what the page does not hold."""
        names = [name for _, attributes in self.elements if (name := attributes.get("id"))]
        found = [name for name, count in Counter(names).items() if count > 1]
        for _, attributes in self.elements:
            found += set((attributes.get("aria-labelledby") or "").split()) - set(names)
            for address in (attributes.get("href") or "data:", attributes.get("src") or "data:"):
                if address.removeprefix("#") not in names and not address.startswith("data:"):
                    found.append(address)
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in ("h2", "h3"):
            self._heading = attributes["id"] or ""
        elif tag == "table":
            self.tables[self._heading] = FoundTable()
        elif tag == "tr":
            self._part = attributes.get("class") or "row"
            if self._part == "row":
                self.tables[self._heading].rows.append([])
        elif tag in ("th", "td"):
            self._cell, self._width = [], int(attributes.get("colspan") or 1)

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("th", "td"):
            return
        assert self._cell is not None
        text, table = "".join(self._cell), self.tables[self._heading]
        self._cell = None
        if self._part == "groups":
            table.groups.append((text, self._width))
        elif self._part == "titles":
            table.titles.append(text)
        else:
            table.rows[-1].append(text)
