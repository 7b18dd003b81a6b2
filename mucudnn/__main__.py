"""``python -m mucudnn``: the same as the command ``mucudnn``."""

from mucudnn.cli.main import main

main(prog_name="mucudnn")
