"""Handles the terminal and the files that users name, for every command.

No command lives here, and nothing of convolutions.
"""
