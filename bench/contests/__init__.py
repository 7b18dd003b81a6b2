"""Measures rivals: torch under its settings, each in a thread of its own, and peaks of memory.

Several benchmarks share them. Tuning uses none of them.
"""
