"""Makes tables, plots and records for every benchmark and command.

It knows no benchmark: each has its own report beside it.
"""
