"""ClosingTime: who may finish, who is ended, and who is refused."""

import asyncio

import pytest

from kvstore_engine_adapter.faces.closing_time import ClosingTime
from kvstore_engine_adapter.generation import EngineClosed


async def started(closing_time, work):
    """A request under way that waits for ``work`` in a step."""
    is_started = asyncio.Event()

    async def run():
        with closing_time.request():
            async with closing_time.step():
                is_started.set()
                return await work

    task = asyncio.create_task(run())
    await is_started.wait()
    return task


async def test_a_request_that_ends_in_time_is_let_finish():
    closing_time, work = ClosingTime(), asyncio.get_running_loop().create_future()
    task = await started(closing_time, work)
    closing = asyncio.create_task(closing_time.close(grace_s=30))
    await asyncio.sleep(0)
    work.set_result("done")
    assert await task == "done"
    await closing


async def test_a_request_that_goes_on_is_ended_and_may_say_so():
    closing_time, work = ClosingTime(), asyncio.get_running_loop().create_future()
    task = await started(closing_time, work)
    await closing_time.close(grace_s=0)
    with pytest.raises(EngineClosed, match="not finished in time"):
        await task


async def test_a_step_begun_after_the_end_ends_at_once():
    closing_time = ClosingTime()
    await closing_time.close(grace_s=0)
    with pytest.raises(EngineClosed):
        async with closing_time.step():
            await asyncio.Event().wait()


async def test_a_new_request_is_refused_once_it_is_closing():
    closing_time = ClosingTime()
    await closing_time.close(grace_s=30)
    with pytest.raises(EngineClosed, match="takes no more requests"), closing_time.request():
        pass


async def test_a_timeout_inside_a_step_stays_one():
    with pytest.raises(TimeoutError):
        async with ClosingTime().step():
            raise TimeoutError
