"""What only graphs of volumes need, which ``rewrite_volumes`` of ``rewrite`` brings into a graph."""
