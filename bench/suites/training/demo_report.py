"""Report of the demo: a table of two trainings."""

from __future__ import annotations

from rich.table import Table

from mucudnn.bench.report.tables import milliseconds, new_table, ratio
from mucudnn.bench.suites.training.side_by_side import TrainingComparison


def training_table(comparison: TrainingComparison) -> Table:
    """Time per step with torch.nn.Conv2d and with mucudnn, how far the losses part, and how exact gradients are."""
    printed = new_table(f"training, {len(comparison.losses)} steps in turns from the same seed", ("",), ("",))
    printed.show_header = False
    printed.add_row("torch.nn.Conv2d, ms per step", milliseconds(comparison.torch_step_s))
    printed.add_row("mucudnn, ms per step", milliseconds(comparison.mucudnn_step_s))
    printed.add_row("speedup of the whole step", ratio(comparison.speedup))
    printed.add_row("loss, first and last step", f"{comparison.losses[0]:.3f} → {comparison.losses[-1]:.3f}")
    rows = (("mucudnn", comparison.difference), ("torch in channels_last", comparison.yardstick))
    for name, difference in rows:
        printed.add_row(f"{name} against torch: largest relative difference of the losses", f"{difference.loss:.1e}")
        printed.add_row(f"{name} against torch: ... and of the first step's gradients", f"{difference.gradient:.1e}")
    printed.add_row("torch against float64: ... of the first step's gradients", f"{comparison.errors.torch:.1e}")
    printed.add_row("mucudnn against float64: ... of the first step's gradients", f"{comparison.errors.mucudnn:.1e}")
    return printed
