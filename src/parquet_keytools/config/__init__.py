"""Configuration: typed settings and the YAML that they come from."""
