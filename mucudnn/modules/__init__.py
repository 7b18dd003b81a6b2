"""The modules that replace torch's convolutions, and the conversion of torch's modules into them.

They compute with ``running``. A pickled model needs both folders.
"""
