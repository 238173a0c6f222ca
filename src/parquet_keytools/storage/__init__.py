"""Files and folders on any file system: found, read by ranges, written whole or not at all."""
