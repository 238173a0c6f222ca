"""How long does a scan of footers take in S3, compared with listing and reading the files' ends; how much memory?

    python benchmarks/scan.py [--files 10000] [--columns 20]

puts files on a moto server in another process, and prints for each round: seconds for the listing and one GET
of the end of each file (Arrow first requests the length of each), before and after the scan; seconds for
`scan --sample 0`; their ratio; the bytes moved for each file, with requests and headers; and the peak
memory of the scanning process.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "services"))

_BUCKET = "bucket"
_END = 64 * 1024
_AT_A_TIME = 16
_SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from moto_server import moto_server
with moto_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def one_file(columns: int, rows: int) -> bytes:
    """Return a file with e-mail addresses and numbers, longer than the part that is read."""
    table = {f"n{number}": [number * row % 9973 + 0.5 for row in range(rows)] for number in range(columns - 1)}
    table["email"] = [f"user{row}@example.org" for row in range(rows)]
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink, use_dictionary=False, compression="none")
    return sink.getvalue()


def filesystem(endpoint: str) -> pafs.S3FileSystem:
    """Return Arrow's file system."""
    host = endpoint.removeprefix("http://")
    return pafs.S3FileSystem(
        access_key="a", secret_key="b", endpoint_override=host, scheme="http", region="us-east-1"
    )


def alone(endpoint: str) -> float:
    """Return how long it takes to list all files, and to read the end of each."""
    store = filesystem(endpoint)
    started = time.perf_counter()
    infos = store.get_file_info(pafs.FileSelector(f"{_BUCKET}/data", recursive=True))

    def get(path: str) -> int:
        with store.open_input_file(path) as file:
            size = file.size()
            return len(file.read_at(min(size, _END), size - min(size, _END)))

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(get, [info.path for info in infos if info.size]))
    return time.perf_counter() - started


def scanned(endpoint: str) -> None:
    """Scan, and print seconds, files, findings and memory: called in a separate process."""
    from parquet_keytools.scan.scanner import scan
    from parquet_keytools.storage.locations import FileLocation

    started = time.perf_counter()
    report = scan(None, FileLocation(filesystem(endpoint), f"{_BUCKET}/data"), sample=0)
    seconds = time.perf_counter() - started
    # Not `ru_maxrss`, which starts with the memory of the parent process.
    memory = int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])
    print(json.dumps([seconds, report.files, len(report.findings), memory]))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scan", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scan:
        scanned(options.scan)
        return
    from s3_store import CountingProxy

    services = str(Path(__file__).parents[1] / "tests" / "services")
    command = [sys.executable, "-c", _SERVER, services]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        store = filesystem(endpoint)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")).close()
        data = one_file(options.columns, 800)

        def put(number: int) -> None:
            with store.open_output_stream(f"{_BUCKET}/data/{number:05}.parquet") as sink:
                sink.write(data)

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(put, range(options.files)))
        print(f"{options.files:,} files of {len(data):,} bytes")
        proxy = CountingProxy(int(endpoint.rpartition(":")[2]))
        through = f"http://127.0.0.1:{proxy.port}"
        for _ in range(options.rounds):
            before = proxy.bytes_moved
            listed = alone(through)
            between = proxy.bytes_moved
            done = subprocess.run(
                [sys.executable, __file__, "--scan", through], check=True, capture_output=True, text=True
            )
            moved = proxy.bytes_moved - between
            listed = (listed + alone(through)) / 2
            seconds, files, findings, memory = json.loads(done.stdout)
            assert (files, findings) == (options.files, 1), done.stdout
            print(
                f"alone {listed:.1f} s, {(between - before) / options.files:,.0f} bytes a file; "
                f"scan {seconds:.1f} s, "
                f"{moved / options.files:,.0f} bytes a file; "
                f"ratio {seconds / listed:.2f}; {memory / 1024:,.0f} MB"
            )
        proxy.close()
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
