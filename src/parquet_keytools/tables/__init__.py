"""pyarrow: encryption properties, reading, writing, data sets; no KMS is called while Arrow's threads work."""
