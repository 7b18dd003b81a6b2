"""One folder or module for each benchmark; shared parts are in ``contests`` and ``report``."""
