"""An asyncio loop on virtual time: sleeps cost nothing, threads run inline, so a seed decides everything."""

import asyncio
import selectors
from concurrent.futures import Future, ThreadPoolExecutor


class InlineExecutor(ThreadPoolExecutor):
    """Runs each job at once, in the caller's thread."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _SkippingSelector(selectors.SelectSelector):
    """Never waits: the time it was asked to wait for has passed when it returns."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never comes")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0 and jumps to the next timer whenever nothing is ready."""

    def __init__(self):
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)
        self.set_default_executor(InlineExecutor(max_workers=1))

    def time(self):
        return self._skipping.now_s


def run_virtual(main):
    """Run a coroutine to its end on a virtual-time loop."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
