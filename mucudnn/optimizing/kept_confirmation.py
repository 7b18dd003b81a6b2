"""Confirmations in the database: the next process puts the same back without running a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from mucudnn.optimizing.steps import ModelSteps
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns
from mucudnn.tuning.result import tuned_of
from mucudnn.words.problem import Operation
from mucudnn.words.results import Configuration

_IN_TURNS = ("step", "recorded", "convolutions")


class KeptConfirmation:
    """Confirmation of a model, as it was tuned, on one sample input. Make it before anything is put back.

    It is found again by a fingerprint of all that decides what is put back, and of what takes time in a step, as far as
    a model tells it.
    """

    def __init__(self, store: EnvironmentStore, steps: ModelSteps, sample_input: Any) -> None:
        self._store, self._steps = store, steps
        modules = steps.modules
        used = {name for module in modules.values() for c in _configurations(module) for name in c.algorithms}
        versions = algorithm_versions(store.environment.device_type)
        self._versions = {name: version for name, version in versions.items() if name in used}
        described = {
            "chosen": [[name, *_chosen(module, steps)] for name, module in modules.items()],
            "frees workspace": steps.config.has_headroom_limit,  # after each call, which takes time
            "versions": self._versions,
            **_described(steps.model, sample_input),
        }
        self._fingerprint = sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def put_back(self) -> Confirmation | None:
        """Put back what was put back then, without a step; ``None``: nothing is known, or not the same to all ranks."""
        ranks = self._steps.ranks
        known, *others = ranks.of_kind(ranks.gather(self._store.confirmation(self._fingerprint)))
        if not ranks.everywhere(known is not None and all(one == known for one in others)):
            return None
        assert known is not None
        measured_at, findings = known
        in_place = [None if one is None else _in_place(**one) for one in findings["in_place"]]
        step, recorded, convolutions = (InTurns(**findings[name]) for name in _IN_TURNS)
        day = measured_at.partition("T")[0]
        found = Confirmation(step, recorded, convolutions, findings["over_tuned"], stored_on=day)
        return confirm_again(self._steps, in_place, found)

    def add(self, found: Confirmation) -> None:
        """Commit what was found, on one rank at each place for all. What others disturbed is not kept."""
        if found.is_disturbed:
            return
        every = [one.in_place for of_module in self._steps.tuned.values() for one in of_module]
        findings = {name: asdict(getattr(found, name)) for name in _IN_TURNS} | {
            "over_tuned": found.over_tuned,
            "in_place": [None if one is None else asdict(one) for one in every],
        }
        rows = self._steps.ranks.gather(
            (self._store.environment, self._fingerprint, self._versions, findings, found.load)
        )
        if self._steps.ranks.is_writer:
            for number, row in enumerate(rows):
                if row not in rows[:number]:
                    self._store.add_confirmation(*row)


def _in_place(operations: list[str], call: dict[str, Any], loses: bool) -> InPlace:
    return InPlace(tuple(map(Operation, operations)), InTurns(**call), loses)


def _configurations(module: TunedModule) -> Iterator[Configuration]:
    """Yield what was chosen, with cached filters and without."""
    yield from (one.configuration for one in tuned_of(module))
    if isinstance(module, Conv2d):
        yield from (c for each in module.cached_filters for c in each.configurations.values())


def _chosen(module: TunedModule, steps: ModelSteps) -> list[Any]:
    """Describe the choices of a module, and where torch's own may be put back."""
    tuned = tuned_of(module)
    return [
        [[*astuple(one.problem), one.batch_size, str(one.epilogue), steps.may_run_torchs_own(one)] for one in tuned],
        [[astuple(part) for part in c.micro_configs] for c in _configurations(module)],
    ]


def _described(model: nn.Module, sample_input: Any) -> dict[str, Any]:
    """Describe the rest of a step: modules and their modes, parameters and buffers, inputs, autocast.

    Names are part of it: layers are put back by name, and equal layers elsewhere in the model have other neighbours.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {
        "modules": [[name, _kind(module), module.training] for name, module in model.named_modules()],
        "tensors": [[name, _of_input(tensor)] for name, tensor in tensors],
        "inputs": [_of_input(leaf) for leaf in tree_leaves(sample_input)],
        "autocast": [str(torch.is_autocast_enabled(t) and torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")],
    }


def _of_input(leaf: object) -> Any:
    """Describe a tensor by its kind, anything else that is plain by its value: it may say what the model does."""
    if isinstance(leaf, Tensor):
        return [] if is_lazy(leaf) else [[*leaf.shape], str(leaf.dtype), leaf.requires_grad]
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else _kind(leaf)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
