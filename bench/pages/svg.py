"""SVG of figures as it stands inside a page: colours follow the page's, names are its own, and it has a description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from mucudnn.bench.report.plots import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#1f2328", "#59636e", "#d0d7de"
SERIES = ("#0b62a8", "#b35900", "#1a7f37", "#8250df", "#b3202b", "#0a7b83", "#9a6700", "#6e7781")
# Colours in which pictures are drawn -> names of the page's style sheet, which has others for dark screens.
_NAMES = {INK: "ink", FAINT: "faint", LINE: "line"} | {colour: f"s{i}" for i, colour in enumerate(SERIES, start=1)}
# Text stays text, in the reader's own font; equal pictures are equal files.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mucudnn",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), INK),
    "axes.edgecolor": FAINT,
    "grid.color": LINE,
}
_PX_IN_PT = 4 / 3
_LEAST_SCALE = 0.75  # of pictures on narrow screens, where they scroll: text stays legible
_PLACES = {"d", "x", "y", "transform"}
_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"


def inline_svg(figure: Figure, identity: str, alternative: str) -> str:
    """Return the figure as an SVG element. alternative: what it shows, for those who do not see it."""
    stream = StringIO()
    write_figure(figure, stream, "svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(stream.getvalue())
    for found in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(found)
    for definitions in root.findall(f"{{{_SVG}}}defs"):
        for style in definitions.findall(f"{{{_SVG}}}style"):
            definitions.remove(style)  # it would be that of the whole page
    _name_apart(root, identity)
    _make_small(root)
    width_px = float(root.attrib.pop("width").removesuffix("pt")) * _PX_IN_PT
    del root.attrib["height"]  # it follows from the width that the screen has
    root.set("style", f"max-width: {width_px:.0f}px; min-width: {_LEAST_SCALE * width_px:.0f}px")
    root.set("role", "img")
    root.set("aria-label", alternative)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return _in_the_colours_of_the_page(ElementTree.tostring(root, encoding="unicode"))


def _name_apart(root: ElementTree.Element, identity: str) -> None:
    """Give what is referred to names of its own, and all else none: a page has several pictures."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    names = {name for pair in used for name in pair if name}
    for element in root.iter():
        if (name := element.attrib.pop("id", None)) in names:
            element.set("id", f"{identity}-{name}")
        for key, value in element.attrib.items():
            element.set(key, re.sub(r"url\(#", f"url(#{identity}-", value))
        if (target := element.get(_LINK, "")).startswith("#"):
            element.set(_LINK, f"#{identity}-{target[1:]}")


def _make_small(root: ElementTree.Element) -> None:
    """Leave out what nobody sees: blanks between elements, groups that say nothing, turns by nothing, and digits below
    a hundredth of a point."""
    for element in root.iter():
        element[:] = _ungrouped(element)
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        element.text = element.text if (element.text or "").strip() else None
        element.tail = None
        for key in _PLACES & element.attrib.keys():
            text = re.sub(r"(\.\d\d)\d+", r"\1", element.attrib[key])
            element.set(key, " ".join(text.split()))


def _ungrouped(parent: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield the children, and in place of groups without attributes, which browsers would keep, theirs."""
    for child in parent:
        if child.tag == f"{{{_SVG}}}g" and not child.attrib:
            yield from _ungrouped(child)
        else:
            yield child


def _in_the_colours_of_the_page(text: str) -> str:
    """Replace colours inside of styles by the page's; text of the picture is left as it is."""
    return re.sub(r'(?<= style=")[^"]*', lambda found: _replaced(found.group()), text)


def _replaced(style: str) -> str:
    return re.sub(r"#[0-9a-f]{6}", lambda found: _named(found.group()), style)


def _named(colour: str) -> str:
    return f"var(--{_NAMES[colour]})" if colour in _NAMES else colour
