"""Serve a read-only file system over HTTP and S3, or mount it, for engines in any language."""
