"""Compares inference with torch: module by module, with and without cached filters.

Tuning and caching themselves live in ``mucudnn/tuning``.
"""
