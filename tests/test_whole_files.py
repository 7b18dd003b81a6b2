"""Files of results are whole at any moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mucudnn.bench.whole_files import write_json, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    write, seen = Path.write_text, list[str]()

    def half(self: Path, text: str, **how: str) -> int:
        written = write(self, text[: len(text) // 2], **how)
        seen.append(path.read_text())
        raise KeyboardInterrupt(written)

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == json.loads(seen[0]) == {"a": 1}


def test_links_and_what_is_no_file_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    write_whole(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()
