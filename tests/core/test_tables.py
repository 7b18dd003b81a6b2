"""A table is the same as plain text, in a frame and as HTML."""

from __future__ import annotations

from support.snapshots import printed

from mucudnn.core.tables import WIDTH, Column, Table, new_table


def test_a_table_is_text_and_html() -> None:
    table = new_table("sizes", ("layer",), ("ms",), footer=("total", "3.5"))
    table.add_row("<a> & b", "1.25")
    table.add_row()
    table.add_row("c")
    table.caption = "one\ntwo"
    assert table.text() == "sizes\nlayer    ms\n<a> & b  1.25\nc\none\ntwo"
    framed = printed(table).splitlines()
    assert framed[0] == "sizes"
    assert framed[4:8] == ["│ <a> & b │ 1.25 │", "├─────────┼──────┤", "│ c       │      │", "├─────────┼──────┤"]
    assert framed[8] == "│ total   │  3.5 │"
    assert framed[-2:] == ["one", "two"]
    html = table.html()
    assert "<caption>one<br>two</caption>" in html
    assert '<th scope="col">layer</th><th scope="col" class="n">ms</th>' in html
    assert '<tr><th scope="row">&lt;a&gt; &amp; b</th><td class="n">1.25</td></tr>' in html
    assert "groups" not in html


def test_long_names_lose_their_middle() -> None:
    table = Table("", [Column("name"), Column("more")], [("a" * 80 + "b" * 80, "c" * 30)])
    line = table.text().splitlines()[1]
    assert len(line) == WIDTH
    assert line.startswith("aaa")
    assert "…" in line
    assert line.endswith("b  " + "c" * 30)


def test_columns_format_numbers() -> None:
    column = Column("ms", ".2f", scale=1e3)
    assert [column.text(value) for value in (0.5, None, float("nan"), "same")] == ["500.00", "", "", "same"]
    assert Column("name").text(3) == "3"
