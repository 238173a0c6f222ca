"""AWS KMS."""

from parquet_keytools.kms.aws.client import AwsKms

__all__ = ["AwsKms"]
