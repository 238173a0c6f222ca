"""KMS clients: the contract, the registry, and the backends. Knows no Parquet."""
