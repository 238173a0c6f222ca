"""A read-only file system served over HTTP and S3, or mounted: for engines of any language."""
