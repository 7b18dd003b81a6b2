"""Writes a result folder, in processes that a test kills.

``python folder_writer.py SUBJECTS`` reads lines. A line with a folder and a file starts a process that measures what
the folder does not have; it notes each subject in the file once it is added. The line ``wait`` tells how it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.database_rows import HERE

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import open_folder


def write(folder: Path, told: Path, subjects: int) -> None:
    """Add two rows for each subject that the folder does not have, and note it."""
    header = Header("made-up", "it", {"rounds": 9}, HERE, subject_columns=("subject",), wanted=subjects)
    with open_folder(folder, header) as writer, told.open("a") as notes:
        for subject in ({"subject": str(number)} for number in range(subjects)):
            if not writer.known(subject):
                writer.add([Row(subject, name, (0.125,) * 9) for name in ("torch", "mucudnn")])
                notes.write(f"{subject['subject']}.\n")
                notes.flush()
        writer.write_summary()


def main() -> None:
    process = 0
    for line in sys.stdin:
        if line.strip() == "wait":
            _, status = os.waitpid(process, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201
            continue
        process = os.fork()
        if process == 0:
            folder, told = map(Path, line.split())
            write(folder, told, int(sys.argv[1]))
            os._exit(0)
        print(process, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
