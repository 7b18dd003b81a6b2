"""Measuring and telling: timer, profiler, layer tables, networks, reports."""
