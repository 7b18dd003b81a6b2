"""The command line: one file for each command. Those of ``mucudnn bench`` are in ``bench``, helpers in ``shared``.

A new command is a file here, whose function has the file's name, and a line in ``COMMANDS`` of ``main``. It imports
what loads torch inside the function, so that ``--help`` stays quick; its paths have the types of ``terminal.files``.
"""
