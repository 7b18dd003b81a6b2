"""The benchmarker: measuring, layer sources, benchmarks and reports.

Each has a folder of its own. Tuning needs ``measure`` alone.
"""
