"""Reports of result folders: tables, pictures and one self-contained page, made from the stored samples alone.

``measured`` and ``layer_rows`` compute every number; tables, pictures and templates only show them.
"""
