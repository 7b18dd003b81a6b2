"""The file ``environment.json``: everything that the rows of a result folder have in common.

It is written before the first measurement. docs/benchmarks.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import mucudnn
from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.export import write_json
from mucudnn.core.errors import InvalidInputError
from mucudnn.running.environment import Environment

FORMAT_VERSION = 1  # Increased when a key or column is removed or changes its meaning, but not when one is added.
HEADER_FILE, ROWS_FILE, SUMMARY_FILE = "environment.json", "rows.jsonl", "summary.json"
_MOST_NAMED = 12  # the most folders that a message lists


def _new_identity() -> str:
    return uuid4().hex[:12]


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a benchmark run: its name, source, settings and environment.

    benchmark: name of the benchmark, such as ``network``. settings: JSON values that determine what is measured; a run
    with different settings cannot resume in the same folder. subject_columns: columns that together identify the
    subject of a row. wanted: total number of subjects. limits: the machine's peak rates, by dtype. is_timed: whether
    rows have time samples. identity: stored in every row, so that a row copied from another folder is detected.
    """

    benchmark: str
    source: str
    settings: Mapping[str, Any]
    environment: Environment
    subject_columns: tuple[str, ...]
    wanted: int
    limits: Mapping[str, MachineLimits] = field(default_factory=dict)
    is_timed: bool = True
    mucudnn: str = mucudnn.__version__
    date: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    identity: str = field(default_factory=_new_identity)

    def differences(self, other: Header) -> list[str]:
        """List the settings and the parts of the environment that differ between this run and another, as texts.

        The machine's peak rates are ignored, because they are measured.
        """
        mine, others = self._decisive(), other._decisive()
        return [
            f"{name} was {_shown(mine.get(name))} and is {_shown(others.get(name))}"
            for name in dict.fromkeys((*mine, *others))
            if mine.get(name) != others.get(name)
        ]

    def _decisive(self) -> dict[str, Any]:
        record = header_record(self)
        return {
            "benchmark": self.benchmark,
            "source": self.source,
            "mucudnn": self.mucudnn,
            **record["environment"],
            **record["settings"],
            "subject_columns": record["subject_columns"],
        }


def write_header(folder: Path, header: Header) -> None:
    """Write the file ``environment.json`` of a result folder. Raises ``OutputError`` if it cannot be written."""
    write_json(folder / HEADER_FILE, header_record(header))


def read_header(folder: Path) -> Header:
    """Read ``environment.json``.

    Raises ``InvalidInputError`` with file and line if the file is missing, incomplete, or of another format version. If
    only subfolders have the file, as in the folder of a recipe, the error names the subfolders.
    """
    path = folder / HEADER_FILE
    if not path.exists() and (below := folders_below(folder)):
        raise InvalidInputError(
            f"{path} does not exist, but {folder} contains result folders; name one of them: "
            f"{', '.join(map(str, below[:_MOST_NAMED]))}{'' if len(below) <= _MOST_NAMED else ', ...'}"
        )
    record = read_object(path)
    require_version(path, record)
    try:
        return Header(
            benchmark=str(record["benchmark"]),
            source=str(record["source"]),
            settings=dict(record["settings"]),
            environment=environment_of(record["environment"]),
            subject_columns=tuple(map(str, record["subject_columns"])),
            wanted=int(record["wanted"]),
            limits={dtype: _limits(rates) for dtype, rates in record["machine_limits"].items()},
            is_timed=bool(record["is_timed"]),
            mucudnn=str(record["mucudnn"]),
            date=datetime.fromisoformat(record["date"]),
            identity=str(record["folder"]),
        )
    except KeyError as error:
        raise InvalidInputError(f"{path} has no {error}; it is not the result of a benchmark") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"{path} has an invalid value: {error}") from None


def folders_below(folder: Path) -> list[Path]:
    """Return the result folders up to three levels below a folder; recipes (stored experiments) nest them this way."""
    return sorted(path.parent for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/{HEADER_FILE}"))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ``InvalidInputError`` with file and line if it holds anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name a folder that a benchmark wrote with --out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        what = f"invalid JSON: {error.msg}; the file is incomplete: write it again"
        raise InvalidInputError(f"{path}, line {error.lineno}: {what}") from None
    except RecursionError:
        raise InvalidInputError(f"{path}: nested too deeply for the result of a benchmark") from None
    if not isinstance(record, dict):
        raise InvalidInputError(f"{path}, line 1: not a JSON object, but {type(record).__name__}")
    return record


def require_version(path: Path, record: Mapping[str, Any]) -> None:
    """Raise ``InvalidInputError`` if the JSON object of a file has an unknown format version."""
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise InvalidInputError(
            f"{path}: format version {version}; mucudnn {mucudnn.__version__} reads {FORMAT_VERSION}: use the version "
            "of mucudnn that wrote it, or a newer one"
        )


def header_record(header: Header) -> dict[str, Any]:
    """Convert a header to the JSON object of ``environment.json``, using lists for tuples as JSON does."""
    record = {
        "format_version": FORMAT_VERSION,
        "folder": header.identity,
        "mucudnn": header.mucudnn,
        "date": header.date.isoformat(),
        "benchmark": header.benchmark,
        "source": header.source,
        "settings": header.settings,
        "environment": asdict(header.environment),
        "machine_limits": {dtype: dict(_rates(limits)) for dtype, limits in header.limits.items()},
        "subject_columns": header.subject_columns,
        "wanted": header.wanted,
        "is_timed": header.is_timed,
    }
    return dict(json.loads(json.dumps(record)))


def _rates(limits: MachineLimits) -> Iterator[tuple[str, float | None]]:
    for name, rate in asdict(limits).items():
        yield name, None if rate == inf else rate


def _limits(rates: Mapping[str, float | None]) -> MachineLimits:
    return MachineLimits(**{name: inf if rate is None else float(rate) for name, rate in rates.items()})


def environment_of(record: Mapping[str, Any]) -> Environment:
    """Parse the environment in a JSON object, ignoring fields that were added by later versions of mucudnn."""
    known = {each.name for each in fields(Environment)}
    return Environment(**{name: value for name, value in record.items() if name in known})


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
