"""The vector kit: encrypted Parquet files, good ones and ones that break exactly one rule."""
