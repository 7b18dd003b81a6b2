"""The command line: one file for each command.

To add a command, add a file whose function has the file's name, and a line in ``COMMANDS`` of ``main``. Import torch
only inside the function, so that ``--help`` stays fast, and use the types of ``shared.parameters`` for paths.

Commands of ``mucudnn bench`` are in the folder ``bench``, helpers in ``shared``.
"""
