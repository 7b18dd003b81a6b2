"""Computes 1x1 convolutions as matrix products on the activations where they lie."""
