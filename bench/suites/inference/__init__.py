"""Benchmark of inference: calls of whole models by torch, mucudnn and other runtimes."""
