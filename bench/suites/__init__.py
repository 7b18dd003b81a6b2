"""The benchmarks, each in a folder or module of its own. The packages ``contests`` and ``report`` have shared code."""
