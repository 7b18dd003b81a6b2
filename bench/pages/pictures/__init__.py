"""Pictures of result folders, drawn by matplotlib: one module for each kind. They compute no number that tables show.

What kinds there are: ``kinds``. Drawing of live results is in ``bench/analyses``.
"""
