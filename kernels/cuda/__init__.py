"""Compiles and starts CUDA C++.

The sources lie beside the algorithms that use them.
"""
