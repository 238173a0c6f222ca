"""KMS clients: the contract, the registry, and a folder for each backend. Knows no Parquet."""
