"""Operators of graphs: what each reads, and how a band of its result is computed."""
