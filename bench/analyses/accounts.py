"""The solvers' accounts of a tuning: of the division of a budget, or of each problem under a limit of its own."""

from __future__ import annotations

from contextlib import suppress

from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.solver.reuse import Account, account_wr
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.units import format_seconds


def accounts_of(tuning: TableTuning) -> list[Account | None]:
    """Solve each row from its measurements under its own limit, before whole runs have their say.

    None where nothing but torch's own, which is not measured by its parts, is within the limit.
    """
    return [_account(row) for row in tuning.rows]


def account_in_words(tuning: TableTuning) -> str:
    """Return one line for all rows together."""
    if tuning.divided is not None:
        return str(tuning.divided.division)
    known = [(row.count, account) for row, account in zip(tuning.rows, accounts_of(tuning), strict=True) if account]
    predicted_s = sum(count * account.objective_s for count, account in known)
    desirable, measured = (sum(getattr(a, name) for _, a in known) for name in ("front_size", "measurements"))
    return (
        f"{len(known)} problems, each solved under its own limit: {format_seconds(predicted_s)} by prediction, "
        f"optimal; {desirable} desirable configurations from {measured} measurements, "
        f"{format_seconds(sum(account.solve_time_s for _, account in known))}"
    )


def _account(row: TunedLayer) -> Account | None:
    tuned = row.tuned
    with suppress(InfeasibleError):
        return account_wr(
            tuned.allowed_measurements, tuned.batch_size, tuned.limit_bytes, what=f"{row.layer}, {tuned.problem}"
        )
    return None
