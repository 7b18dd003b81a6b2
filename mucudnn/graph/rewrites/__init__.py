"""Exact rewrites of graphs of ATen."""
