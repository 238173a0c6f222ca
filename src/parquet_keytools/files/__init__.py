"""One file and its keys: opened, checked, converted."""
