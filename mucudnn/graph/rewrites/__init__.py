"""Rewrites of captured graphs of ATen, before they become ours."""
