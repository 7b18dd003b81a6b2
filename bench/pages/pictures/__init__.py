"""Pictures of result folders, drawn by matplotlib: one module for each kind. It computes no number that tables show.

What kinds there are: ``kinds``. Drawing of live results is in ``bench/analyses``.
"""
