"""Shows result folders: tables, pictures, one self-contained page, from the stored samples alone.

``measured`` and ``layer_rows`` compute every number; tables, pictures and templates only show them.
"""
