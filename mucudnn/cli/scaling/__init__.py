"""Commands about training on many ranks; what they compute is in the top folder ``bench/scaling``."""
