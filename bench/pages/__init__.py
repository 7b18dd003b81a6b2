"""Reports of result folders: tables, pictures and one self-contained page, made only from the stored samples.

``measured`` and ``layer_rows`` compute every number; tables, pictures and templates only show them.
"""
