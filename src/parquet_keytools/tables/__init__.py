"""pyarrow: encryption properties, reading, writing, data sets.

No call to a KMS is made while Arrow's own threads work: an exception from there can abort or hang the
process. All keys are had before Arrow starts, and its callbacks answer from what is there.
"""
