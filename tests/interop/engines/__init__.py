"""One source file for each engine: how it writes and reads encrypted files."""
