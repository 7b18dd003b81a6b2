"""Names a contestant as result folders do. Reports of folders need this alone: it loads no torch."""

from __future__ import annotations

TORCH = "torch"
