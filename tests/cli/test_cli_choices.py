"""The choices of a config, as options: each has one, in the commands where it decides something."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest
from support.command_line import commands, fail, invoke

from mucudnn.bench.sources import table_tuning
from mucudnn.bench.suites.training import benchmark as training
from mucudnn.words.config import Config

COMMANDS = dict(commands())
TRAINING = ("bench", "training", "alexnet")


def names(command: click.Command) -> set[str]:
    return {str(parameter.name) for parameter in command.params}


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """What the command tunes with."""
    seen: list[Any] = []

    def stop(sources: object, batch_sizes: object, options: Any, *_: object, **__: object) -> None:
        seen.append(options.config)
        raise KeyboardInterrupt

    def stop_tuning(table: object, config: Config, **_: object) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "benchmark_training", stop)
    monkeypatch.setattr(table_tuning, "tune_table", stop_tuning)
    result = invoke(*arguments)
    assert seen, result.output
    config: Config = seen[0]
    return config


def test_every_choice_has_an_option() -> None:
    assert {field.name for field in fields(Config)} <= set().union(*map(names, COMMANDS.values()))


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if "workspace_limit" in names(command)])
def test_wherever_there_is_a_limit_it_is_said_whether_it_holds_torchs_own(name: str) -> None:
    assert "limits_torch" in names(COMMANDS[name])


@pytest.mark.parametrize(
    ("given", "expected"), [((), None), (("--limit-torch",), True), (("--no-limit-torch",), False)]
)
@pytest.mark.parametrize("command", [("tune", "alexnet", "--batch", "2"), ("batch", "alexnet"), TRAINING])
def test_whether_the_limit_holds_torchs_own_is_handed_on(
    command: tuple[str, ...], given: tuple[str, ...], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_of(monkeypatch, *command, *given).limits_torch is expected


@pytest.mark.parametrize("option", ["--limit-torch", "--no-limit-torch"])
def test_a_budget_always_holds_torchs_own(option: str) -> None:
    message = fail("tune", "alexnet", "--batch", "2", "--workspace-budget", "1MiB", option)
    assert "a budget always applies to PyTorch's own convolution too" in message


def test_what_only_enable_knows_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--how", "enable", "--first-call-time", "7s", "--background")
    config = config_of(monkeypatch, *TRAINING, *options)
    assert (config.first_call_time_s, config.background) == (7.0, True)
    config = config_of(monkeypatch, *TRAINING)
    assert (config.first_call_time, config.background) == (Config().first_call_time, Config().background)


@pytest.mark.parametrize("options", [("--background",), ("--first-call-time", "1s")])
def test_what_only_enable_knows_is_refused_without_it(options: tuple[str, ...]) -> None:
    message = fail(*TRAINING, *options)
    assert options[0] in message
    assert "add --how enable" in message


@pytest.mark.parametrize(
    "command", [("explain", "alexnet", "--batch", "2", "--budget", "1GiB"), ("tune", "alexnet", "--batch", "2")]
)
def test_quick_tuning_is_the_default(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not config_of(monkeypatch, *command).thorough
    assert config_of(monkeypatch, *command, "--thorough").thorough


def test_curves_over_all_batch_sizes_are_measured_thoroughly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch, "batch", "alexnet", "--up-to", "2").thorough
    assert "each algorithm at every size" in " ".join(invoke("batch", "--help").output.split())
