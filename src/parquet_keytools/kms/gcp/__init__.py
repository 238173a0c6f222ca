"""Google Cloud KMS."""

from parquet_keytools.kms.gcp.client import GcpKms

__all__ = ["GcpKms"]
