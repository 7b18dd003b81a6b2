"""Whether a file lies in a network folder, by what the system says is mounted where."""

from __future__ import annotations

from pathlib import Path

import pytest

from mucudnn.database.network_folders import network_file_system

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:50 / /home rw shared:2 master:3 - nfs4 server:/home rw,vers=4.2
24 23 8:2 / /home/local rw - xfs /dev/sdb1 rw
25 22 0:51 / /my\040data rw - lustre 10.0.0.1@tcp:/data rw
""".lstrip()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/measurements.sqlite", "nfs4"),
        ("/home/local/measurements.sqlite", None),
        ("/homes/measurements.sqlite", None),
        ("/tmp/measurements.sqlite", None),
        ("/my data/measurements.sqlite", "lustre"),
    ],
)
def test_the_innermost_mount_tells(tmp_path: Path, path: str, expected: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_file_system(Path(path), mounts) == expected


def test_nobody_knows_without_a_list(tmp_path: Path) -> None:
    assert network_file_system(tmp_path / "measurements.sqlite", tmp_path / "missing") is None


def test_a_link_leads_to_where_the_file_is(tmp_path: Path) -> None:
    mounts, there = tmp_path / "mountinfo", tmp_path / "there"
    there.mkdir()
    (tmp_path / "here").symlink_to(there)
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:50 / {there.resolve()} rw - nfs server:/ rw\n")
    assert network_file_system(tmp_path / "here" / "measurements.sqlite", mounts) == "nfs"
