"""Rotation of master keys: wrapped keys re-wrapped, over whole data sets."""
