"""The modules that replace torch's convolutions, and the conversion of torch's modules into them.

They compute with the folder ``running``. To load a pickled model, both folders are needed.
"""
