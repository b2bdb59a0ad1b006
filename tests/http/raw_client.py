"""A client that says what it is told to, byte by byte, and hears what there is."""

import asyncio
import contextlib


class RawClient:
    """One TCP connection to a face."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, face, *, ssl=None):
        host, _, port = face.url.rpartition("//")[2].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=ssl)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def say(self, data):
        self.writer.write(data if isinstance(data, bytes) else data.encode())
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def hear_all(self, timeout_s=30.0):
        """Return everything until the server ends the connection."""
        heard = bytearray()
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(OSError):
                while data := await self.reader.read(1 << 16):
                    heard += data
        return bytes(heard)

    async def hear_answer(self, timeout_s=30.0):
        """Return (status, body) of the next answer that has a Content-Length."""
        async with asyncio.timeout(timeout_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            return int(head.split(" ")[1]), await self.reader.readexactly(length)


def head(method, path, **headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines) + "\r\n\r\n"


async def until(condition, timeout_s=30.0):
    """Wait until it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for is no event)
            await asyncio.sleep(0.005)
