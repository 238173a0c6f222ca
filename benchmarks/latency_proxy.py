"""A proxy on this machine that adds latency: a KMS is rarely as near as a test server."""

from __future__ import annotations

import argparse
import asyncio


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Forward bytes after a delay; calls on one connection do not wait for each other."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, chunk = await chunks.get()
            await asyncio.sleep(due - loop.time())
            if not chunk:
                sink.close()
                return
            sink.write(chunk)
            await sink.drain()

    delivery = asyncio.create_task(deliver())
    chunk = b"-"
    while chunk:
        try:
            chunk = await source.read(65_536)
        except OSError:
            chunk = b""
        chunks.put_nowait((loop.time() + seconds, chunk))
    await asyncio.gather(delivery, return_exceptions=True)


async def serve(host: str, port: int, seconds: float) -> None:
    """Serve on a free loopback port, and print it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        # All of the latency is on the way back, so that each chunk of an answer is delayed once.
        await asyncio.gather(_pass_on(reader, upstream_writer, 0), _pass_on(upstream_reader, writer, seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Run the proxy until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--milliseconds", type=float, required=True)
    arguments = parser.parse_args()
    host, _, port = arguments.to.rpartition(":")
    asyncio.run(serve(host, int(port), arguments.milliseconds / 1e3))


if __name__ == "__main__":
    main()
