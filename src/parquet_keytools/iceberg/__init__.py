"""Encrypted tables of Apache Iceberg: key metadata, AGS1 streams, and PyIceberg with keys from any KMS."""
