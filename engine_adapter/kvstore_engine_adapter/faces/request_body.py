"""Reading a request's body: bounded in time and size, plain or compressed."""

import asyncio
import zlib

from aiohttp import web

from kvstore_engine_adapter.faces.api_error import ApiError

_PATIENCE_S = 30.0
_GZIP_BITS, _ZLIB_BITS = 31, 15


async def read_body(request: web.Request) -> bytes:
    """Return the body as it was before the client compressed it.

    The server must not decompress it by itself (``auto_decompress=False``): aiohttp logs damaged data with a
    traceback.

    Raises:
        ApiError: 408 it did not arrive in time; 400 its compressed data is damaged; 413 it is too large; 415
            it is in an encoding other than gzip and deflate.
        HTTPRequestEntityTooLarge: what was sent is too large.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            sent = await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {_PATIENCE_S:.0f} seconds") from error
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body arrived cut short or damaged") from error
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    match encoding:
        case "identity":
            return sent
        case "gzip" | "x-gzip":
            return _decompressed(sent, _GZIP_BITS, max_bytes=request.client_max_size)
        case "deflate":
            return _decompressed(sent, _ZLIB_BITS, max_bytes=request.client_max_size)
    raise ApiError(
        415, f"Content-Encoding {encoding[:40]!r} is not supported: send the body plain or in gzip"
    )


def _decompressed(data: bytes, window_bits: int, *, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(window_bits)
    try:
        body = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not in its Content-Encoding: {error}") from error
    if len(body) > max_bytes:
        raise ApiError(413, f"the decompressed body has more than {max_bytes} bytes, the limit")
    if not decompressor.eof or decompressor.unused_data:
        raise ApiError(400, "the body is not in its Content-Encoding: it is cut short, or more follows it")
    return body
