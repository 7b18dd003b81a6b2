"""Optimizes models: puts what was chosen into them, confirms it in their own steps, and reports it.

What is chosen is decided in ``tuning``; the modules that run it are in ``modules``.
"""
