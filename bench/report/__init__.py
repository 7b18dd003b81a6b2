"""Tables, plots and records that the reports of benchmarks and commands share."""
