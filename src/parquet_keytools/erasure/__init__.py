"""Erasure of rows: files rewritten without them."""
