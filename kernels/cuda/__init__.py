"""Compilation and launch of CUDA C++, whose sources are in the folders of the algorithms that use them."""
