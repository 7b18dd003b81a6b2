"""Settings say their words: in Python, by variables and by options alike, and printed as they may be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mucudnn.cli.shared import options
from mucudnn.core.config import SETTINGS, Config, config_from_environment, in_words
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import Operation

WORDS = (  # setting, words for None, of which the first is printed, and what the field then is
    ("workspace_limit", ("none",), None),
    ("workspace_budget", ("off", "none"), None),
    ("cache_budget", ("none",), None),
    ("operations", ("all",), tuple(Operation)),
    ("algorithms", ("all",), None),
    ("max_relative_error", ("auto",), None),
    ("time_limit", ("auto", "none"), None),
    ("keep_heap", ("auto",), None),
    ("confirm", ("auto",), None),
    ("memory_budget", ("off", "none"), None),
    ("fuse", ("auto",), None),
)
EVERY_WORD = [(name, word, meaning) for name, words, meaning in WORDS for word in words]
FLAGS = ("keep_heap", "confirm", "fuse")  # of which the option has no value: what is not given is "auto"
REFUSED = (  # value in Python, and in which words it is refused
    ({"workspace_limit": "off"}, "size 'off' is not understood; write a number and a unit, for example 64MiB"),
    ({"workspace_limit": "auto"}, "(B, KiB, MiB, GiB, TiB), or headroom, or none"),
    ({"workspace_budget": "all"}, "(B, KiB, MiB, GiB, TiB), or off"),
    ({"cache_budget": "off"}, "(B, KiB, MiB, GiB, TiB), or none"),
    ({"memory_budget": "auto"}, "(B, KiB, MiB, GiB, TiB), or off"),
    ({"operations": "none"}, "allowed are forward, backward_data, backward_filter, or all"),
    ({"operations": ["all", "forward"]}, "one of operations is 'all'"),
    ({"algorithms": ""}, "or all"),
    ({"max_relative_error": "none"}, "it must be a finite number, or auto"),
    ({"time_limit": "all"}, "write for example 60s, 2min or 500ms, or auto"),
    ({"keep_heap": "off"}, "keep_heap is 'off'; it must be True or False, or auto"),
    ({"confirm": "none"}, "confirm is 'none'; it must be True or False, or auto"),
    ({"strict": "auto"}, "strict is 'auto'; it must be True or False"),
    ({"workspace_limit": None, "workspace_budget": 64}, "workspace_limit is 'none' and workspace_budget is 64"),
)


def options_give(*arguments: str, variables: dict[str, str] | None = None) -> Config:
    """Return the config that a command with an option for each word gets from a command line."""
    configs = []

    @click.command(context_settings={"auto_envvar_prefix": "MUCUDNN"})
    @options.config(*(name for name, _, _ in WORDS))
    def command(config: Config) -> None:
        configs.append(config)

    result = CliRunner().invoke(command, arguments, env=variables)
    if result.exit_code:
        raise InvalidInputError(result.output)
    return configs[0]


def test_every_setting_whose_default_is_none_has_a_word_but_the_database() -> None:
    named = {name for name, _, _ in WORDS}
    assert {name for name, setting in SETTINGS.items() if setting.metadata["word"]} == named
    assert {name for name, setting in SETTINGS.items() if setting.default is None} <= named | {"database"}


@pytest.mark.parametrize(("name", "word", "meaning"), EVERY_WORD)
def test_words_are_none_in_python(name: str, word: str, meaning: object) -> None:
    for spelled in (word, f" {word.capitalize()} "):
        config = Config(**{name: spelled})
        assert getattr(config, name) == meaning
        assert (config, hash(config)) == (Config(**{name: None}), hash(Config(**{name: None})))


@pytest.mark.parametrize(("name", "word", "meaning"), EVERY_WORD)
def test_words_are_none_in_variables_and_options(name: str, word: str, meaning: object) -> None:
    variables = {f"MUCUDNN_{name.upper()}": word}
    assert config_from_environment(variables) == Config(**{name: None})
    assert getattr(options_give(variables=variables), name) == meaning
    given = () if name in FLAGS else (f"--{name.replace('_', '-')}", word)
    assert getattr(options_give(*given), name) == meaning


@pytest.mark.parametrize(("settings", "expected"), REFUSED)
def test_other_words_are_refused_with_what_is_allowed(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Config(**settings)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", [name for name, _, _ in WORDS if name not in FLAGS])
def test_options_and_variables_refuse_other_words_as_python_does(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Config(**{name: "perhaps,"})
    allowed = str(caught.value).rpartition(", ")[2]
    with pytest.raises(InvalidInputError, match=allowed):
        config_from_environment({f"MUCUDNN_{name.upper()}": "perhaps,"})
    with pytest.raises(InvalidInputError) as caught:
        options_give(f"--{name.replace('_', '-')}", "perhaps,")
    assert allowed in " ".join(str(caught.value).split())


def test_a_config_prints_words_and_is_what_it_prints() -> None:
    assert repr(Config()) == (
        "Config(workspace_limit='64MiB', workspace_budget='off', cache_budget=0, policy='power-of-two', "
        "operations='all', algorithms='all', max_relative_error='auto', deterministic=False, batch_invariant=False, "
        "time_limit='auto', database=None, strict=False, keep_heap='auto', confirm='auto', share_tuning=True, "
        "memory_budget='off', fuse='auto')"
    )
    other: Any = {"operations": "backward-data,forward", "algorithms": "gemm", "database": Path("rows.sqlite")}
    for config in (
        Config(),
        Config(**other, workspace_limit="headroom", max_relative_error=1e-4, time_limit="2min", keep_heap=False),
        Config(workspace_limit=None, cache_budget=None, memory_budget="1GiB", confirm=True, policy="all"),
    ):
        assert eval(repr(config)) == config
        assert Config(**in_words(config)) == config


def test_help_says_the_words_of_defaults() -> None:
    @click.command(context_settings={"show_default": True, "max_content_width": 200})
    @options.config(*(name for name, _, _ in WORDS))
    def command(config: Config) -> None:
        """Do nothing."""

    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for name, (word, *_), meaning in WORDS:
        if name not in FLAGS and Config() == Config(**{name: None}):
            assert f"[default: {word}]" in shown.partition(f"--{name.replace('_', '-')} ")[2][:300], (name, meaning)
    assert shown.count("Default: auto") == len(FLAGS)
