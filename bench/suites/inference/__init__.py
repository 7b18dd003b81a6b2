"""Compares inference with torch: whole and module by module, with and without cached filters.

Tuning and caching themselves live in ``mucudnn/tuning``.
"""
