"""``report``, which shows the choices of ``optimize`` as a table, in full detail, as a data frame and as HTML."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mucudnn.core.answers import TunedProblem, left_out_in_words, row_of
from mucudnn.core.problem import Operation
from mucudnn.core.records import FailureKind
from mucudnn.core.tables import Column, Table, choice_cell, filled, listed, speedup_cell
from mucudnn.core.values import format_bytes, format_seconds, grouped, instance
from mucudnn.optimizing.confirm import Confirmation, PutBack
from mucudnn.optimizing.groups import TunedGroup
from mucudnn.optimizing.keeping import Keeping
from mucudnn.running.keeping import KeepingModule
from mucudnn.running.modules import OURS, TunedModule, TunedTransposed, torchs_class, why_left_alone
from mucudnn.running.norms import NORMS, TunedNorm, why_not_grouped
from mucudnn.running.problems import problem_operation

if TYPE_CHECKING:
    import pandas

    from mucudnn.graph.fitting import Fitted

_FASTEST = "nothing is faster"
_UNREACHED = "not reached by the sample input"
_KINDS = ", ".join(kind.__name__ for kind in OURS)


@dataclass(frozen=True, slots=True)
class Report:
    """Report of the choices for the convolutions of a model. It prints as a table; ``details()`` has everything.

    layers: module name and the choice for one of its operations.
    convolutions: number of convolutions of tunable classes.
    untuned: module name and the reason why torch's convolution runs.
    transposed: names of layers whose forward operation is backward data of their problem.
    confirmations: comparisons of whole steps, one for each part of the model that was optimized separately.
    unconfirmed: reasons why parts of the model were not compared.
    memory: how a model runs within its memory budget, for each input that it was tuned for.
    groups: module name and the calls of its norms that run as groups, with their times.
    ungrouped: name of a norm's module and the reason why its norms are PyTorch's own.
    keeping: what the forward passes of a model in training keep within its memory budget; None without one.
    """

    layers: tuple[tuple[str, TunedProblem], ...]
    convolutions: int = 0
    untuned: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()
    confirmations: tuple[Confirmation, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    memory: tuple[Fitted, ...] = ()
    groups: tuple[tuple[str, TunedGroup], ...] = ()
    ungrouped: tuple[tuple[str, str], ...] = ()
    keeping: Keeping | None = None

    @property
    def confirmation(self) -> Confirmation | None:
        """The comparison of whole steps (the last one if there are several), or None if steps were not compared."""
        return self.confirmations[-1] if self.confirmations else None

    def __str__(self) -> str:
        """Return the report as a text table: a row for each layer, totals, and untuned layers with the reason.

        Lines have at most 100 columns, unless names of algorithms need more. Of a model within a memory budget, it has
        a row for each segment.
        """
        if self.memory:
            return "\n".join(map(str, self.memory))
        if not self.layers:
            return "\n".join(self._without_layers())
        return self._table().text()

    def details(self) -> str:
        """Return, as text, times, workspace, error and reason of all choices and confirmations."""
        if not self.layers:
            return "\n".join(self._without_layers())
        lines = [f"{_named(name)}: {tuned}" for name, tuned in self.layers]
        lines += [f"{_named(name)}: {group}" for name, group in self.groups]
        lines += [] if self.keeping is None else [str(self.keeping)]
        lines += [f"confirmed: {confirmation.details()}" for confirmation in self.confirmations]
        lines += [f"not confirmed: {reason}" for reason in self.unconfirmed]
        return "\n".join((*lines, *self._untuned_in_words(), *_by_reason("PyTorch's norms in", self.ungrouped)))

    def to_frame(self) -> pandas.DataFrame:
        """Return a data frame with a row for each operation of a layer: geometry, choice, reason, seconds, bytes."""
        import pandas

        rows = ({"layer": name, **row_of(tuned), "reason": tuned.reason} for name, tuned in self.layers)
        return pandas.DataFrame(list(rows))

    def _repr_html_(self) -> str:
        """Return the report as HTML for notebooks: a table, or preformatted text if there is none."""
        return f"<pre>{escape(str(self))}</pre>" if self.memory or not self.layers else self._table().html()

    def _without_layers(self) -> list[str]:
        """Return the lines that replace an empty table, with the reason why no convolution is tuned."""
        if not self.convolutions:
            return [f"no convolutions to tune: the model has no torch.nn.{_KINDS}", *self._untuned_in_words()]
        if all(reason.startswith(_UNREACHED) for _, reason in self.untuned):
            return [
                f"no tuned convolutions among {self.convolutions}: call mucudnn.optimize(model, sample_input) first; "
                "convolutions that the sample input does not reach stay PyTorch's own"
            ]
        return [*self._untuned_in_words()]

    @property
    def _batch_sizes(self) -> set[int]:
        return {tuned.batch_size for _, tuned in self.layers}

    def _table(self) -> Table:
        alike = f", batch {min(self._batch_sizes)}" if len(self._batch_sizes) == 1 else ""
        titles = (f"layer{alike}", *(str(operation).replace("_", " ") for operation in Operation), "speedup")
        return Table("", [*map(Column, titles)], [*self._rows()], caption="\n".join(self._summary()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of a table row for each layer and shape of its calls."""
        calls = grouped(
            ((name, tuned.batch_size, tuned.problem.with_operation(Operation.FORWARD)), tuned)
            for name, tuned in self.layers
        )
        for (name, batch_size, _), problems in calls.items():
            is_transposed = name in self.transposed
            cells = {tuned.problem.operation: choice_cell(tuned.configuration, _speedup([tuned])) for tuned in problems}
            operations = (problem_operation(operation, transposed=is_transposed) for operation in Operation)
            batch = f", batch {batch_size}" if len(self._batch_sizes) > 1 else ""
            title = f"{_named(name)}{', transposed' * is_transposed}{batch}"
            yield title, *(cells.get(operation, "") for operation in operations), _speedup(problems)

    def _summary(self) -> Iterator[str]:
        problems = [tuned for _, tuned in self.layers]

        # Times and workspace of all together.
        time_s, torch_s = sum(tuned.time_s for tuned in problems), _torch_s(problems)
        at_least = "more than " if any(tuned.baseline_s is None for tuned in problems) else ""
        against = "" if torch_s is None else f"PyTorch {at_least}{format_seconds(torch_s)}, "
        sizes = grouped((tuned.configuration.is_baseline, tuned.configuration.workspace_bytes) for tuned in problems)
        ours_bytes, torchs_bytes = (max(sizes.get(is_baseline, [0])) for is_baseline in (False, True))
        beyond = f", {format_bytes(torchs_bytes)} where PyTorch's own runs" if torchs_bytes > ours_bytes else ""
        yield (
            f"all together: {against}mucudnn {format_seconds(time_s)}, speedup {_speedup(problems) or 'unknown'}; "
            f"workspace at most {format_bytes(ours_bytes)} a call{beyond}"
        )
        if bound := [tuned for tuned in problems if tuned.unrestricted_s is not None]:
            bound_s, unrestricted_s = sum(tuned.time_s for tuned in bound), sum(t.unrestricted_s or 0.0 for t in bound)
            yield filled(
                f"with {torch.get_num_threads()} threads each sample has the same bits in any batch, for "
                f"{bound_s / unrestricted_s:.2f} times the time of choices without that (predicted)"
            )
        if busy := sum(tuned.is_disturbed for tuned in problems):
            yield filled(
                f"* {busy} of {len(problems)} choices were measured on a busy machine, and their speedups are "
                "doubtful: tuning on a quiet machine measures them again"
            )

        yield from self._groups_in_words()
        if self.keeping is not None:
            yield filled(str(self.keeping))

        # What whole steps said.
        for confirmation in self.confirmations:
            yield filled(f"confirmed: {confirmation}")
            if confirmation.heap is not None:
                yield filled(str(confirmation.heap))
            yield from _named_in("PyTorch's own restored, as it is faster in the step,", confirmation.put_back)
            yield from _named_in(
                "slower in the step, but PyTorch's own is above the workspace limit,", confirmation.kept
            )
        for reason in self.unconfirmed:
            yield filled(f"not confirmed: {reason}")

        # What was not measured, or runs PyTorch's own.
        yield from self._barred_in_words()
        if left_out := left_out_in_words(problems):
            yield filled(left_out)
        yield from self._untuned_in_words()
        yield from _by_reason("PyTorch's norms in", self.ungrouped)

    def _groups_in_words(self) -> Iterator[str]:
        """Yield a line for each kind of group, and one for all together."""
        kinds = grouped((str(group.call), group) for _, group in self.groups)
        for kind, groups in sorted(kinds.items()):
            torch_s, time_s = (sum(getattr(group, field) for group in groups) for field in ("baseline_s", "time_s"))
            calls = sum(group.calls for group in groups)
            yield filled(
                f"group {kind}, {calls} calls, forward and backward: PyTorch {format_seconds(torch_s)}, mucudnn "
                f"{format_seconds(time_s)}, speedup {speedup_cell(torch_s, time_s)}"
            )

    def _barred_in_words(self) -> Iterator[str]:
        """Yield a line for torch's convolutions that are too slow to measure, and one for each reason to bar others.

        Another line follows if foreign code was not proven.
        """
        slow, slow_s, barred = list[str](), 0.0, list[tuple[str, str]]()
        for name, tuned in self.layers:
            place = f"{_named(name)} ({tuned.problem.operation})"
            if tuned.barred is not None and tuned.barred.least_s:
                slow.append(place)
                slow_s += tuned.barred.least_s
            elif tuned.barred is not None:
                barred.append((place, tuned.barred.reason))
        if slow:
            where, total = listed(slow), format_seconds(slow_s)
            yield filled(f"PyTorch's own is too slow to measure in {where}: more than {total} in all")
        yield from _by_reason("PyTorch's own is barred in", barred)
        failures = (failure for _, tuned in self.layers for failure in tuned.failures)
        if unproven := next((failure.reason for failure in failures if failure.kind is FailureKind.UNPROVEN), None):
            yield filled(f"code of libraries was not tried: {unproven}")

    def _untuned_in_words(self) -> Iterator[str]:
        """Yield a line for each reason why modules run torch's convolution."""
        return _by_reason("PyTorch's own in", ((_named(name), reason) for name, reason in self.untuned))


def report(model: torch.nn.Module) -> Report:
    """Report the choice of ``optimize`` for each convolution of ``model``, with the reason; empty if nothing is tuned.

    Raises ``InvalidInputError`` if ``model`` is not a module.
    """
    graphs = sys.modules.get("mucudnn.graph.model")  # loaded for models that run as graphs alone
    if graphs is not None and isinstance(model, graphs.BandedModel):
        graphs_fitted: tuple[Fitted, ...] = model.tuned_graphs.findings
        by_name = (layer for fitted in graphs_fitted for layer in fitted.choices.items())
        return Report(_layers(by_name), memory=graphs_fitted)
    named_modules = [*instance(torch.nn.Module, model, "model").named_modules()]
    modules = {name: module for name, module in named_modules if isinstance(module, TunedModule)}
    norms = {name: module for name, module in named_modules if isinstance(module, (TunedNorm, *NORMS))}
    why_ungrouped = [(name, _why_ungrouped(module)) for name, module in norms.items()]
    convolutions = {name: module for name, module in named_modules if isinstance(module, _ConvNd)}
    reasons = [(name, _why_untuned(module)) for name, module in convolutions.items()]
    is_grouped = any(isinstance(module, TunedNorm) for module in norms.values())
    confirmations = [cast("Confirmation | None", module.confirmation) for module in modules.values()]
    return Report(
        keeping=getattr(model, "keeping", None) if isinstance(model, KeepingModule) else None,
        groups=tuple(
            (name, group)
            for name, module in norms.items()
            if isinstance(module, TunedNorm) and module.choices is not None
            for group in module.groups
        ),
        ungrouped=tuple((name, reason) for name, reason in why_ungrouped if reason is not None and is_grouped),
        layers=_layers((name, module.tuned) for name, module in modules.items()),
        convolutions=sum(torchs_class(type(module)) is not None for module in convolutions.values()),
        untuned=tuple((name, reason) for name, reason in reasons if reason is not None),
        transposed=tuple(name for name, module in modules.items() if isinstance(module, TunedTransposed)),
        confirmations=tuple(dict.fromkeys(filter(None, confirmations))),
        unconfirmed=tuple(dict.fromkeys(module.unconfirmed for module in modules.values() if module.unconfirmed)),
    )


def _layers(by_name: Iterable[tuple[str, Sequence[TunedProblem]]]) -> tuple[tuple[str, TunedProblem], ...]:
    """Return the choices that modules, or the convolutions of graphs, hold, each with their name."""
    return tuple((name, tuned) for name, problems in by_name for tuned in problems)


def _by_reason(what: str, places: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line of ``what`` for each reason, of places with their reasons."""
    for reason, names in grouped((reason, place) for place, reason in places).items():
        yield filled(f"{what} {listed(names)}: {reason}")


def _named_in(what: str, where: Sequence[PutBack]) -> Iterator[str]:
    """Yield a line of ``what`` and the names of the modules in ``where``; nothing if there are none."""
    names = list(dict.fromkeys(_named(problem.module) for problem in where))
    if names:
        yield filled(f"{what} in {listed(names)}")


def _why_untuned(module: _ConvNd) -> str | None:
    """Return the reason why a convolution runs torch's code; None if it runs tuned choices."""
    cls = type(module)
    if (torchs := torchs_class(cls)) is None:
        return f"{cls.__name__} is not tuned, only {_KINDS}"
    if any(is_lazy(parameter) for parameter in module.parameters()):
        return "a lazy module that has not run yet"
    if (reason := why_left_alone(module)) is not None:
        return reason
    if isinstance(module, TunedModule) and module.tuned:
        return _why_torchs_own(module)
    wrapped = next(filter(is_traceable_wrapper_subclass, module.parameters()), None)
    if wrapped is not None:
        return f"its parameters are {type(wrapped).__name__}, of which PyTorch computes convolutions"
    if cls.forward is not torchs.forward:
        return f"{_UNREACHED}, or {cls.__name__}.forward does not call super().forward"
    return _UNREACHED


def _why_ungrouped(module: torch.nn.Module) -> str | None:
    """Return the reason why a module's norms do not run as groups; None if they do."""
    if not isinstance(module, TunedNorm):
        return why_not_grouped(module) or _UNREACHED
    return module.why_torchs or None


def _why_torchs_own(module: TunedModule) -> str | None:
    """Return the reason why a tuned module runs torch's convolution, such as another device; None if it does not."""
    assert isinstance(module, _ConvNd)
    if module.choices is None:
        return _FASTEST
    device, dtype = module.weight.device.type, str(module.weight.dtype).removeprefix("torch.")
    if device != module.choices.device_type:
        return f"tuned for {module.choices.device_type}, and now on {device}"
    dtypes = {tuned.problem.dtype for tuned in module.tuned}
    return None if dtype in dtypes else f"tuned for {' and '.join(sorted(dtypes))}, and now {dtype}"


def _torch_s(problems: Sequence[TunedProblem]) -> float | None:
    """Return the total (or least) time of torch's convolution for these problems, or None if one is not known."""
    times = [tuned.least_baseline_s for tuned in problems]
    return None if None in times else sum(time_s or 0.0 for time_s in times)


def _speedup(problems: Sequence[TunedProblem]) -> str:
    """Return the cell of the speedup of these problems together."""
    return speedup_cell(
        _torch_s(problems),
        sum(tuned.time_s for tuned in problems),
        is_least=any(tuned.baseline_s is None for tuned in problems),
        is_doubtful=any(tuned.is_disturbed for tuned in problems),
    )


def _named(name: str) -> str:
    return name or "(the model itself)"
