"""Measurements in, configurations out. Pure functions: numpy and pulp, never torch."""
