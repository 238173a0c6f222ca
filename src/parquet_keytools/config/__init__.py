"""Configuration: typed settings, loaded from YAML or a mapping."""
