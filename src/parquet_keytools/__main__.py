"""Runs the command line: `python -m parquet_keytools`."""

from parquet_keytools.cli import main

if __name__ == "__main__":
    main()
