"""Sources of convolutions (networks, tables, files, models), and tuning of all their layers. Prints nothing."""
