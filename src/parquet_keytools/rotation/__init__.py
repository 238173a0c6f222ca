"""Rotation of master keys: wrapped keys wrapped anew, over whole data sets."""
