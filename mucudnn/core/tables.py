"""Tables, as text and as HTML, and the texts of their cells. Lines of plain text have at most ``WIDTH`` columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, zip_longest
from textwrap import fill
from typing import TYPE_CHECKING

from mucudnn.core.config import Config
from mucudnn.core.records import Configuration, MicroConfig, source_of
from mucudnn.core.values import format_bytes

if TYPE_CHECKING:
    import rich.table

WIDTH = 100
_LEAST_NAME = 16  # columns


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    title: heading, with the unit.
    form: format of numbers, which are right-aligned; None for text.
    scale: factor that numbers are multiplied by.
    group: title above adjacent columns, in HTML.
    key: key of the values, if rows come from a data frame.
    """

    title: str
    form: str | None = None
    scale: float = 1.0
    group: str = field(default="", kw_only=True)
    key: str = field(default="", kw_only=True)

    def text(self, value: object) -> str:
        """Format a value for a cell of this column; return an empty text if there is no value."""
        if value is None or value != value:
            return ""
        if self.form is None or not isinstance(value, (int, float)):
            return str(value)
        return format(value * self.scale, self.form)


@dataclass(slots=True, eq=False)
class Table:
    """A table of formatted texts. An empty row is a line between rows.

    footer: a text for each column, or none.
    caption: what readers have to know, at the end of a text.
    """

    title: str
    columns: Sequence[Column]
    rows: list[Sequence[str]] = field(default_factory=list)
    footer: Sequence[str] = ()
    caption: str = ""
    show_header: bool = True

    def add_row(self, *cells: str) -> None:
        """Add a row; cells that are missing at the end are empty."""
        self.rows.append(cells)

    def text(self) -> str:
        """Return plain text with aligned columns. Too long names in the first column lose their middle."""
        titles = [column.title for column in self.columns]
        rows = [[*row, *("" for _ in titles[len(row) :])] for row in (titles, *self.rows)]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        first = min(first, max(WIDTH - sum(widths) - len("  ") * len(widths), _LEAST_NAME))
        lines = []
        for name, *cells in rows:
            keep = (first - 1) // 2
            shown = name if len(name) <= first else f"{name[: first - 1 - keep]}…{name[-keep:]}"
            padded = (cell.ljust(width) for cell, width in zip((shown, *cells), (first, *widths), strict=True))
            lines.append("  ".join(padded).rstrip())
        return "\n".join(filter(None, (self.title, *lines, self.caption)))

    def __rich__(self) -> rich.table.Table:
        """Return the table as a terminal shows it, in a frame that fits its width."""
        from rich.table import Table as Framed

        framed = Framed(
            title=self.title,
            caption=self.caption or None,
            title_justify="left",
            caption_justify="left",
            show_header=self.show_header,
            show_footer=bool(self.footer),
        )
        for column, text in zip_longest(self.columns, self.footer, fillvalue=""):
            assert isinstance(column, Column)
            framed.add_column(column.title, str(text), justify="left" if column.form is None else "right")
        for row in self.rows:
            if row:
                framed.add_row(*row)
            else:
                framed.add_section()
        return framed

    def html(self) -> str:
        """Return a ``table`` element; cells of numbers have the class ``n``."""
        classes = ["" if column.form is None else ' class="n"' for column in self.columns]
        titles = zip((column.title for column in self.columns), classes, strict=True)
        heads = [f'<th scope="col"{attribute}>{escape(title)}</th>' for title, attribute in titles]
        lines = ["<table>", f"<caption>{escape(self.caption).replace(chr(10), '<br>')}</caption>", "<thead>"]
        if any(column.group for column in self.columns):
            groups = [(name, len([*equal])) for name, equal in groupby(column.group for column in self.columns)]
            cells = (f'<th scope="colgroup" colspan="{width}">{escape(name)}</th>' for name, width in groups)
            lines.append(f'<tr class="groups">{"".join(cells)}</tr>')
        lines += [f'<tr class="titles">{"".join(heads)}</tr>', "</thead>", "<tbody>"]
        for name, *texts in filter(None, self.rows):
            cells = (f"<td{attribute}>{escape(text)}</td>" for text, attribute in zip(texts, classes[1:], strict=False))
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
        return "\n".join((*lines, "</tbody>", "</table>"))


def new_table(title: str, left: Sequence[str], right: Sequence[str], footer: Sequence[str] = ()) -> Table:
    """Return a table without rows, of left-aligned columns, then right-aligned ones, by their titles."""
    return Table(title, [*map(Column, left), *(Column(heading, form="") for heading in right)], footer=footer)


def filled(text: str) -> str:
    """Wrap a line of text at ``WIDTH`` columns, with indented continuation lines."""
    return fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def listed(names: Sequence[str], limit: int = 4, separator: str = ", ") -> str:
    """Join names; if there are more than ``limit``, list the first ones and count the rest.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c, d and 1 more'
    """
    remainder = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{separator.join(names[:limit])}{remainder}"


def memory_bound(config: Config) -> str:
    """Return what bounds memory under a config as text for titles, such as ``workspace limit 64 MiB``."""
    if config.workspace_budget_bytes is not None:
        return f"workspace budget {format_bytes(config.workspace_budget_bytes)}"
    if config.has_headroom_limit:
        return "workspace within the headroom"
    return f"workspace limit {format_bytes(config.workspace_limit_bytes)}"


def short_name(names: Sequence[str]) -> str:
    """Shorten layer names ``a, b, c`` to ``a +2``, for a table row that several equal layers share."""
    first = names[0] or "(the model itself)"
    return f"{first} +{len(names) - 1}" if len(names) > 1 else first


def milliseconds(time_s: float) -> str:
    """Format a time in milliseconds, without the unit.

    >>> milliseconds(0.02)
    '20.00'
    """
    return f"{time_s * 1e3:.2f}"


def ratio(value: float) -> str:
    """Format a ratio with two decimals and a multiplication sign.

    >>> ratio(1.4)
    '1.40×'
    """
    return f"{value:.2f}×"


def speedup_cell(torch_s: float | None, time_s: float, *, is_least: bool = False, is_doubtful: bool = False) -> str:
    """Format a speedup over torch's time; empty if that is unknown.

    is_least: whether torch takes longer than this.
    is_doubtful: whether a time was measured on a busy machine.

    >>> speedup_cell(3.0, 2.0), speedup_cell(3.0, 2.0, is_least=True, is_doubtful=True), speedup_cell(None, 2.0)
    ('1.50×', '>1.50×*', '')
    """
    return "" if torch_s is None else f"{'>' * is_least}{ratio(torch_s / time_s)}{'*' * is_doubtful}"


def choice_cell(configuration: Configuration, speedup: str) -> str:
    """Format a choice: its main algorithm, size and number of the micro-batches, number of other parts, speedup.

    >>> parts = (*[MicroConfig("fft", 8)] * 4, MicroConfig("gemm", 2))
    >>> choice_cell(Configuration(parts, 1.0, 0), "1.52×")
    'fft 8×4 +1 1.52×'
    """
    if configuration.is_baseline:
        return "PyTorch"
    samples: Counter[MicroConfig] = Counter()
    for part in configuration.micro_configs:
        samples[part] += part.micro_batch_size
    (main, total), *smaller = samples.most_common()
    size = main.micro_batch_size
    cut = f"{size}×{total // size}" if total > size else f"{size}"
    return f"{source_of(main.algorithm)} {cut}{f' +{len(smaller)}' * bool(smaller)} {speedup}".rstrip()


def images_per_s(images: int, time_s: float) -> str:
    """Format the throughput in images per second.

    >>> images_per_s(8, 0.25)
    '32.0'
    """
    return f"{images / time_s:.1f}"
