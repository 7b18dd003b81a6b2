"""Runs eager calls past torch's dispatcher, in fewer microseconds than the registered operators take.

What lives here: when a call may take this path (``plain``), executables bound to C (``bound``), the extension ``_call``
and what stands in for it (``hot_path``), and the functions of autograd (``calls``). The operators themselves live
above.
"""
