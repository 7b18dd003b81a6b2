"""The benchmarks, each a folder or a module; code that several benchmarks share is in ``contests`` and ``report``."""
