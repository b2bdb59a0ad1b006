"""Outlasting: waiting for work that must end before its caller may go, cancelled or not.

A thread that copies uses buffers its caller lent. So a cancelled caller leaves only when the thread is done.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def outlast(future: "asyncio.Future[T]", *, when_cancelled: Callable[[], None] | None = None) -> T:
    """Await a future; when cancelled, wait until it is done all the same, then raise CancelledError.

    ``when_cancelled`` is called at the first cancellation, to make the work end early. However often the
    caller is cancelled, it waits. What the work then returns or raises is dropped.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if when_cancelled is not None:
            when_cancelled()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen: whoever wanted the outcome is gone
        raise
