"""Terminal output and user-named files, for all commands; independent of convolutions."""
