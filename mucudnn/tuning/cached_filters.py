"""The choice of filters to cache: a memory budget divided over a model's layers, confirmed by whole runs.

A module can cache its filter as prepared by one algorithm. Then that algorithm's setup is only a check of the filter's
fingerprint, and its prepared bytes count against the budget instead of the workspace limit, so the fastest
configuration may differ from the one without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod

import torch
from torch import Tensor

from mucudnn.database.copying import CopyingDatabase
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.distributed.team import Team
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.measuring.operands import Operands, followed_operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.filter_cache import CachedFilter, FilterCache
from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.choose import is_gain
from mucudnn.tuning.result import TunedProblem, tuned_of
from mucudnn.tuning.tuner import machine_and_database
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WholeRun, WithCachedFilter, WithEpilogue
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.warning import warn

# The cost of fingerprinting a filter: an optimistic constant, so that equal measurements give equal answers.
FINGERPRINT_BYTES_PER_S = 20e9
FINGERPRINT_S = 5e-6

_Tuned = tuple[TunedProblem, ...]  # one forward problem of a module at each tuned batch size, largest first


def cache_filters(
    model: torch.nn.Module, config: Config, *, machine: Machine | None = None, database: Database | None = None
) -> Division[str] | None:
    """Let tuned convolutions of ``model`` cache filters within ``config.cache_budget`` where it makes them faster.

    Sets ``filter_cache`` of every ``mucudnn.Conv2d``. A filter is cached if complete calls with the cache were faster,
    by more than the noise, than interleaved calls of the same module without it; stored comparisons are not repeated.
    Returns the division of the budget: module and problem -> configuration with the cached bytes, which may be 0.
    Returns None if the budget is 0, if nothing is tuned, and, with a warning, if the compiled code for fingerprints is
    missing. On devices other than the CPU nothing is cached, also with a warning.

    Raises ``DatabaseError`` for a file that cannot be read.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv2d)}
    for module in modules.values():
        module.filter_cache = None
    if config.cache_budget_bytes == 0:
        return None
    _warn_of_other_devices(modules.values())
    items = dict(_items(modules))
    if not items:
        return None
    if reason := loaded_build().why_not_compiled:
        warn(f"no filters are kept: their fingerprints need the compiled library: {reason}")
        return None
    with machine_and_database(config, machine=machine, database=database) as (on, opened):
        chooser = _Chooser(config, on, EnvironmentStore(opened, on.environment))
        division = chooser.divide({item: tuned for item, (_, tuned) in items.items()})
        filters = {item: chooser.cached_filter(tuned, division.assignment[item]) for item, (_, tuned) in items.items()}
    for name, module in modules.items():
        its_own = [filters[item] for item, (owner, _) in items.items() if owner == name]
        if cached := [one for one in its_own if one is not None]:
            module.filter_cache = FilterCache(cached, keeps_workspace=not config.has_headroom_limit)
    return division


def cache_filters_together(
    model: torch.nn.Module, config: Config, team: Team, *, machine: Machine, database: Database
) -> None:
    """Call ``cache_filters`` on several ranks with equal choices: the first rank of each device kind measures."""
    with team.propagate_errors(), closing(CopyingDatabase(database)) as known:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv2d)}
        cache, rows = partial(cache_filters, model, config, machine=machine, database=known), []
        if team.is_first:
            cache()
            problems = {tuned.problem for module in modules.values() for tuned in tuned_of(module)}
            rows = known.rows_that_count(machine.environment, problems)
        known.take(chain.from_iterable(team.gather(rows)), copies=team.is_writer)
        if not team.is_first:
            cache()
        team.agree({f"cached filters of {name}": _described(module) for name, module in modules.items()})


def _described(module: Conv2d) -> Mapping[str, str]:
    cache = module.filter_cache
    return {} if cache is None else {str(one.problem): repr(one.configurations) for one in cache.filters}


def _warn_of_other_devices(modules: Iterable[Conv2d]) -> None:
    """Warn that nothing is cached on a GPU.

    Only a filter's bytes reveal every change: ``.data``, older views, CUDA graphs and other processes change them
    without a new version number. On a GPU each call would have to wait for all queued work before it could read them.
    """
    devices = {str(m.weight.device) for m in modules if m.tuned and m.weight.device.type != FilterCache.device_type}
    if devices:
        where = ", ".join(sorted(devices))
        warn(
            f"no filters are kept on {where}: each call would have to wait for the device to see whether they have "
            "changed; cache_budget is for the CPU",
        )


def cached_run(
    problem: ConvProblem, configuration: Configuration, algorithm: str, operands: Operands
) -> Callable[[], object]:
    """Return a call of the convolution with a cached filter of ``algorithm``; the first call prepares it.

    An epilogue (such as ReLU) is computed by the executable if it supports that, or else in place afterwards.
    """
    cache = FilterCache([CachedFilter(problem, algorithm, 0, {configuration.batch_size: configuration})])
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)

    epilogue = operands.epilogue

    @torch.no_grad()
    def call() -> Tensor | None:
        y = cache.convolve(operands.x, operands.w, None, geometry, epilogue)
        if y is not None or epilogue is None:
            return y
        y = cache.convolve(operands.x, operands.w, None, geometry)
        return None if y is None else epilogue.apply(y)

    return call


def compare_cached(
    machine: Machine,
    problem: ConvProblem,
    configuration: Configuration,
    algorithm: str,
    instead_of: Configuration,
    epilogue: WithEpilogue | None = None,
) -> WholeRun | Exception:
    """Compare the convolution with a cached filter of ``algorithm`` to ``instead_of`` without cache, interleaved.

    epilogue: computed in both calls; None if there is none.
    """
    operands = followed_operands(problem, configuration.batch_size, epilogue, machine.device)
    uncached = machine.whole_run(problem, instead_of, operands)
    cached = cached_run(problem, configuration, algorithm, operands)
    (outcome,) = machine.in_turns(uncached, [cached])
    return outcome


@dataclass(frozen=True, slots=True)
class _Option:
    """A filter, prepared by ``algorithm``, that may be cached.

    cost: seconds of all calls together, and cached bytes. configurations: the configuration to run with the cached
    filter, by tuned batch size.
    """

    algorithm: str
    configurations: Mapping[int, Configuration]
    cost: Configuration


class _Chooser:
    """The choice of filters to cache within the budget, revised after complete convolution calls are timed."""

    def __init__(self, config: Config, machine: Machine, store: EnvironmentStore) -> None:
        self.config, self.machine, self.store = config, machine, store
        self.versions = {algorithm.name: algorithm.version for algorithm in machine.algorithms}
        self.options: dict[_Tuned, list[_Option]] = {}  # equal layers share options and whole runs
        self.reasons: dict[tuple[_Tuned, str], str] = {}  # of options confirmed by whole runs

    def divide(self, items: Mapping[str, _Tuned]) -> Division[str]:
        """Divide the budget; repeat without refuted options until whole runs confirm all chosen ones."""
        for tuned in items.values():
            self.options.setdefault(tuned, list(_options(tuned)))
        while True:
            offers = {i: [_uncached(t), *(option.cost for option in self.options[t])] for i, t in items.items()}
            division = solve_wd(offers, self.config.cache_budget_bytes)
            chosen = {t: option for i, t in items.items() if (option := self._option(t, division.assignment[i]))}
            refuted = [(tuned, option) for tuned, option in chosen.items() if not self._is_confirmed(tuned, option)]
            if not refuted:
                return division
            for tuned, option in refuted:
                self.options[tuned].remove(option)

    def cached_filter(self, tuned: _Tuned, cost: Configuration) -> CachedFilter | None:
        """Return the filter to cache for ``cost``, a choice of the division; None if nothing is to be cached."""
        option = self._option(tuned, cost)
        if option is None:
            return None
        every, problem = _with_smaller_batches(option, tuned), tuned[0].problem
        configurations = {
            n: c for n, c in every.items() if n in option.configurations or not self._is_refuted(tuned[0], option, c)
        }
        reason = self.reasons[tuned, option.algorithm]
        return CachedFilter(problem, option.algorithm, cost.workspace_bytes, configurations, reason)

    def _option(self, tuned: _Tuned, cost: Configuration) -> _Option | None:
        return next((option for option in self.options[tuned] if option.cost == cost), None)

    def _is_confirmed(self, tuned: _Tuned, option: _Option) -> bool:
        """Whether calls with the option's cached filter are faster than calls without, at every tuned batch size."""
        if (tuned, option.algorithm) in self.reasons:
            return True
        runs = [run for one in tuned if (run := self._run(one, option)) is not None]
        if len(runs) < len(tuned) or not all(map(is_gain, runs)):
            return False
        gain = runs[0].speedup
        reason = f"{gain:.2f} ± {runs[0].noise:.2f} times as fast as not kept, in whole runs"
        self.reasons[tuned, option.algorithm] = reason
        return True

    def _is_refuted(self, tuned: TunedProblem, option: _Option, configuration: Configuration) -> bool:
        """Whether a stored whole run shows that this configuration, with the cache, is not faster than torch's own."""
        own = MicroConfig(TORCHS_OWN, configuration.batch_size)
        how = WithCachedFilter(option.algorithm, (own,), tuned.epilogue)
        run = self.store.whole_run(tuned.problem, configuration.micro_configs, self.versions, how)
        return run is not None and not is_gain(run)

    def _run(self, tuned: TunedProblem, option: _Option) -> WholeRun | None:
        """Return the comparison of the option with the module without cache, stored or new; None if it cannot run."""
        problem, configuration = tuned.problem, option.configurations[tuned.batch_size]
        how = WithCachedFilter(option.algorithm, tuned.configuration.micro_configs, tuned.epilogue)
        known = self.store.whole_run(problem, configuration.micro_configs, self.versions, how)
        if known is not None:
            return known
        outcome = compare_cached(
            self.machine, problem, configuration, option.algorithm, tuned.configuration, tuned.epilogue
        )
        if not isinstance(outcome, WholeRun):
            return None
        self.store.add_whole_run(problem, configuration.micro_configs, self.versions, outcome, how)
        return outcome


def _items(modules: Mapping[str, Conv2d]) -> Iterator[tuple[str, tuple[str, _Tuned]]]:
    """Yield, for each module and forward problem, a label, the module's name, and the tuning results."""
    for name, module in modules.items():
        forward = [tuned for tuned in tuned_of(module) if tuned.problem.operation is Operation.FORWARD]
        if module.weight.device.type != FilterCache.device_type:
            continue
        for problem in dict.fromkeys(tuned.problem for tuned in forward):
            of_problem = [tuned for tuned in forward if tuned.problem == problem]
            by_size = sorted({tuned.batch_size: tuned for tuned in of_problem}.items(), reverse=True)
            yield f"{name or 'the model itself'}, {problem}", (name, tuple(tuned for _, tuned in by_size))


def _uncached(tuned: _Tuned) -> Configuration:
    return replace(tuned[0].configuration, time_s=sum(one.configuration.time_s for one in tuned), workspace_bytes=0)


def _options(tuned: _Tuned) -> Iterator[_Option]:
    """Yield an ``_Option`` for each algorithm that prepares filters and fits the workspace limits."""
    prepared_bytes: dict[str, int] = {}
    for m in (m for one in tuned for m in one.allowed_measurements):
        name = m.micro_config.algorithm
        prepared_bytes[name] = max(prepared_bytes.get(name, 0), m.prepared_bytes)
    for name in sorted(name for name, size in prepared_bytes.items() if size):
        fastest = {one.batch_size: _fastest_with(name, one) for one in tuned}
        configurations = {n: found for n, found in fastest.items() if found is not None}
        if len(configurations) == len(tuned):
            largest = configurations[tuned[0].batch_size]
            time_s = sum(configuration.time_s for configuration in configurations.values())
            cost = replace(largest, time_s=time_s, workspace_bytes=prepared_bytes[name])
            yield _Option(name, configurations, cost)


def _fastest_with(name: str, tuned: TunedProblem) -> Configuration | None:
    """Return the fastest configuration if it uses the named algorithm, else the fastest with that algorithm alone.

    The latter may win in whole runs even if the predictions favour another configuration.
    """
    n, limit = tuned.batch_size, tuned.limit_bytes
    measurements = _with_cached(name, tuned)
    own = [m for m in measurements if m.micro_config.algorithm == name]
    fastest = desirable_sets(measurements, n).fastest(n, limit)
    if fastest is not None and name in fastest.algorithms:
        return fastest
    return desirable_sets(own, n).fastest(n, limit) if own else None


def _with_smaller_batches(option: _Option, tuned: _Tuned) -> dict[int, Configuration]:
    """Return configurations by batch size, including smaller sizes whose fastest one uses the cached filter."""
    configurations: dict[int, Configuration] = {}
    for one in tuned:  # largest first, so that results of smaller batch sizes override
        sets = desirable_sets(_with_cached(option.algorithm, one), one.batch_size)
        fastest = {n: sets.fastest(n, one.limit_bytes) for n in range(1, one.batch_size)}
        configurations |= {n: c for n, c in fastest.items() if c is not None and option.algorithm in c.algorithms}
    return {**configurations, **option.configurations}


def _with_cached(name: str, tuned: TunedProblem) -> Sequence[Measurement]:
    """Return the measurements, adjusted as if the named algorithm's prepared filter were cached."""
    problem = tuned.problem
    w_bytes = problem.item_bytes * prod(problem.w_shape())
    fingerprint_s = FINGERPRINT_S + w_bytes / FINGERPRINT_BYTES_PER_S
    return [
        replace(m, setup_s=fingerprint_s, prepared_bytes=0) if m.micro_config.algorithm == name else m
        for m in tuned.allowed_measurements
    ]
