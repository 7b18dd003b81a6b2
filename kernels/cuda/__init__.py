"""CUDA C++ of our own, compiled when it is first needed."""
