"""States what an algorithm is, with the buffers, references and counts that all families use.

No algorithm lives here.
"""
