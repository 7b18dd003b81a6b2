"""Tells whether a file lies in a folder of another machine, where locks of several hosts cannot be trusted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OF_A_NETWORK = (
    *("afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2"),
    *("smb3", "smbfs", "wekafs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"),
)


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the name of the network file system that a file lies in; ``None``: it lies in none, or nobody knows.

    mounts: the system's list of what is mounted where.
    """
    place, found = path.absolute().resolve(), ("", "")
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            where, kind = _unescaped(before.split(" ")[4]), after.split(" ")[0]
            if place.is_relative_to(where) and len(where) >= len(found[0]):
                found = where, kind
    return found[1] if found[1] in _OF_A_NETWORK else None


def _unescaped(text: str) -> str:
    r"""Undo the kernel's octal escapes.

    >>> _unescaped(r"/my\040data")
    '/my data'
    """
    head, *escaped = text.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in escaped)
