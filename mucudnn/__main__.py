"""``python -m mucudnn``: the same as the command ``mucudnn``."""

from mucudnn.cli.main import run

run()
