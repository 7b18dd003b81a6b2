"""Proving foreign code: its first run on this machine happens in a separate process with heap checks.

This folder holds the client, the process, and the code that runs in it. Callers decide what follows from a proof.
"""
