"""How to compute one micro-batch: one file per algorithm family."""
