"""Everything that was ever measured: kept in one SQLite file, exported, read back, and handed to who solves from it."""
