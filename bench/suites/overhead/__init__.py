"""Measures what a call costs beside its arithmetic: untuned and tuned (``operator``), and divided (``divided``).

The operators themselves live in ``mucudnn/running``.
"""
