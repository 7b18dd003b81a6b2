"""Computes convolutions by minimal filtering, with one backend for each way to run it.

The C++ is in ``kernels/compiled``, starting CUDA C++ in ``kernels/cuda``.
"""
