"""Ciphers: modules and files. Knows no KMS."""
