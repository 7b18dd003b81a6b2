"""Measures what a divided call costs beside its arithmetic.

The operators themselves live in ``mucudnn/running``.
"""
