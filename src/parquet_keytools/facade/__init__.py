"""What `Keytools` can do, a source file for each subject; `keytools.py` puts them together."""
