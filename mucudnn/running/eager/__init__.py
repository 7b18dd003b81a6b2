"""Runs eager calls (outside ``torch.compile``) past torch's dispatcher, faster than registered operators.

This folder has the conditions under which a call may take this path (``plain``), executables bound to C (``bound``),
the extension ``_call`` and its Python replacement (``hot_path``), and the functions of autograd (``calls``). The
operators themselves are in the folder above.
"""
