"""Transforms and matrix products in C++, built at install; see ``library.py``."""
