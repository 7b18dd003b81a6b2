"""Shows result folders: tables, pictures, one self-contained page, from the stored samples alone.

``measured``, ``layer_rows`` and ``gains`` compute every number; tables, ``pictures/`` and the template only show them.
"""
