"""How late the event loop is: what every answer waits for before anything is done for it."""

import asyncio

from kvstore.counters import Durations

_INTERVAL_S = 0.5


async def measure_loop_delay(delays: Durations) -> None:
    """Note twice a second how much later than asked the loop went on; runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        asked_s = loop.time() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        delays.note(max(0.0, loop.time() - asked_s))
