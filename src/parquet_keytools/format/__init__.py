"""Bytes: what a Parquet file looks like. Knows no keys and no ciphers."""
