"""Converts tunings and benchmarks to JSON objects: plain dictionaries, in seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.results import Configuration
from mucudnn.running.environment import Environment

FORMAT_VERSION = 1  # Format version of all records, increased when a key is removed or changes its meaning.

Record = dict[str, Any]

_DECIDE_NOTHING = ("confirm", "first_call_time", "database")


def stamp() -> Record:
    """Return the first keys of every JSON object: the versions of the format and of mucudnn, and the current time."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format_version": FORMAT_VERSION, "mucudnn": mucudnn.__version__, "date": date}


def record_header(config: Config, environment: Environment) -> Record:
    """Return the first keys of the JSON object of every tuning: versions, date, environment and settings."""
    return {
        **stamp(),
        "environment": asdict(environment),
        "config": {**config_record(config), "database": None if config.database is None else str(config.database)},
    }


def config_record(config: Config) -> Record:
    """Return the settings of a config that decide what is measured, as JSON values."""
    return {name: value for name, value in asdict(config).items() if name not in _DECIDE_NOTHING}


def configuration_record(configuration: Configuration) -> Record:
    return {"configuration": str(configuration), "workspace_bytes": configuration.workspace_bytes}
