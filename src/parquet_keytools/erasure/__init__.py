"""Erasure: of the master keys of one value, such as one tenant, and of rows in files."""
