"""Fast path of eager calls (outside ``torch.compile``), which bypasses torch's dispatcher and registered operators.

``hot_path`` has the C++ extension ``_call``, its Python replacement, and the conditions for a call to take this path.
The operators and their autograd functions are in the folder above.
"""
