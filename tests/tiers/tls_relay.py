"""TlsRelay: TLS in front of a plain server on loopback, in a process of its own."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class TlsRelay:
    def __init__(
        self, server_port: int, certificate: Path, key: Path, *, client_ca: Path | None = None
    ) -> None:
        words = [sys.executable, "-m", "tests.tiers.tls_relay", str(server_port), str(certificate), str(key)]
        words += [str(client_ca)] if client_ca else []
        self._process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()


async def relay(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


async def main(server_port: int, certificate: str, key: str, client_ca: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(relay(reader, to_server), relay(from_server, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], (sys.argv[4:] or [None])[0]))
