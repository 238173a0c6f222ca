"""KMS clients, one a source file. Knows no Parquet."""
