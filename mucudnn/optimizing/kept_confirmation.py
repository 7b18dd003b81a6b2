"""Keeps in the database what steps of a model have shown: the next process puts back the same without running one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.kernels.registry import algorithm_versions
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.optimizing.confirm import confirm_again
from mucudnn.optimizing.ranks import Alone
from mucudnn.optimizing.steps_in_turns import Steps
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns
from mucudnn.tuning.result import tuned_of
from mucudnn.words.config import Config
from mucudnn.words.problem import Operation
from mucudnn.words.results import Configuration

_IN_TURNS = ("step", "recorded", "convolutions")


class KeptConfirmation:
    """Place in the database for what steps of a model have shown, as it was tuned, on one sample input.

    modules: those that were tuned, by their names. Make it before anything is put back: it is found again by all that
    decides what is put back, and by what takes time in a step, as far as a model tells it.
    """

    def __init__(
        self,
        store: EnvironmentStore,
        model: nn.Module,
        sample_input: Any,
        modules: Mapping[str, TunedModule],
        steps: Steps,
        config: Config,
    ) -> None:
        self._store, self._modules, self._steps = store, modules, steps
        used = {name for module in modules.values() for c in _configurations(module) for name in c.algorithms}
        self._versions = {
            name: version for name, version in algorithm_versions(store.environment.device_type).items() if name in used
        }
        described = {
            "chosen": [[name, *_chosen(module, steps)] for name, module in modules.items()],
            "frees workspace": config.has_headroom_limit,  # after each call, which takes time
            "versions": self._versions,
            **_described(model, sample_input),
        }
        self._fingerprint = sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def put_back(self, ranks: Alone) -> Confirmation | None:
        """Put back what was put back then, without a step; ``None``: nothing is known, or not the same to all ranks."""
        known = ranks.known_to_all(self._known())
        if known is None:
            return None
        day, findings = known
        in_place = [None if one is None else _in_place(**one) for one in findings["in_place"]]
        step, recorded, convolutions = (InTurns(**findings[name]) for name in _IN_TURNS)
        found = Confirmation(step, recorded, convolutions, findings["over_tuned"], stored_on=day)
        before = {name: tuned_of(module) for name, module in self._modules.items()}
        return confirm_again(self._steps, before, in_place, found)

    def _known(self) -> tuple[str, dict[str, Any]] | None:
        """Return the day on which the steps ran, and their findings; ``None``: there are none, or damaged ones."""
        known = self._store.confirmation(self._fingerprint)
        if known is None or len(known[1]["in_place"]) != sum(len(tuned_of(one)) for one in self._modules.values()):
            return None
        measured_at, findings = known
        return measured_at.partition("T")[0], findings

    def add(self, found: Confirmation, ranks: Alone) -> None:
        """Commit what was found, on one rank at each place for all. What others disturbed is not kept."""
        if found.is_disturbed:
            return
        every = [one.in_place for module in self._modules.values() for one in tuned_of(module)]
        findings = {name: asdict(getattr(found, name)) for name in _IN_TURNS} | {
            "over_tuned": found.over_tuned,
            "in_place": [None if one is None else asdict(one) for one in every],
        }
        row = (self._store.environment, self._fingerprint, self._versions, findings, found.load)
        for one in ranks.to_write(row):
            self._store.add_confirmation(*one)


def _in_place(operations: list[str], call: dict[str, Any], loses: bool) -> InPlace:
    return InPlace(tuple(map(Operation, operations)), InTurns(**call), loses)


def _configurations(module: TunedModule) -> Iterator[Configuration]:
    """Yield what was chosen, with cached filters and without."""
    yield from (one.configuration for one in tuned_of(module))
    if isinstance(module, Conv2d):
        yield from (c for each in module.cached_filters for c in each.configurations.values())


def _chosen(module: TunedModule, steps: Steps) -> list[Any]:
    """Describe the choices of a module, and where torch's own may be put back."""
    problems = [[*astuple(one.problem), one.batch_size, steps.may_run_torchs_own(one)] for one in tuned_of(module)]
    epilogues = [str(one.epilogue) for one in tuned_of(module) if one.epilogue is not None]
    return [
        problems,
        *([epilogues] if epilogues else []),
        [[astuple(part) for part in c.micro_configs] for c in _configurations(module)],
    ]


def _described(model: nn.Module, sample_input: Any) -> dict[str, Any]:
    """Describe the rest of a step: modules and their modes, parameters and buffers, inputs, autocast.

    Names are part of it: layers are put back by name, and equal layers elsewhere in the model have other neighbours.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {
        "modules": [[name, _kind(module), module.training] for name, module in model.named_modules()],
        "tensors": [[name, *_of_tensor(tensor)] for name, tensor in tensors],
        "inputs": [_of_input(leaf) for leaf in tree_leaves(sample_input)],
        "autocast": [str(torch.is_autocast_enabled(t) and torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")],
    }


def _of_tensor(tensor: Tensor) -> list[Any]:
    return [] if is_lazy(tensor) else [[*tensor.shape], str(tensor.dtype), tensor.requires_grad]


def _of_input(leaf: object) -> Any:
    """Describe a tensor by its kind, anything else that is plain by its value: it may say what the model does."""
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else _kind(leaf)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
