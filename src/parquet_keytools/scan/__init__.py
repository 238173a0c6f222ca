"""Finds columns that look like personal data."""
