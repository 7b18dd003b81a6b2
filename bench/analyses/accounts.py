"""The solvers' accounts of a tuning in words: of the division of a budget, or of each problem under its own limit."""

from __future__ import annotations

from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.words.units import format_seconds


def account_in_words(tuning: TableTuning) -> str:
    """Return one line for all rows together."""
    if tuning.divided is not None:
        return str(tuning.divided.division)
    known = [(row.count, account) for row in tuning.rows if (account := row.tuned.account) is not None]
    predicted_s = sum(count * account.objective_s for count, account in known)
    desirable, measured = (sum(getattr(a, name) for _, a in known) for name in ("front_size", "measurements"))
    return (
        f"{len(known)} problems, each solved under its own limit: {format_seconds(predicted_s)} by prediction, "
        f"optimal; {desirable} desirable configurations from {measured} measurements, "
        f"{format_seconds(sum(account.solve_time_s for _, account in known))}"
    )
