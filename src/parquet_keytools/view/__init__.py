"""File systems in which encrypted files look like plain Parquet; needs the extra `fsspec`."""
