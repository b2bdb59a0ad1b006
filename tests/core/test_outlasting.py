"""Work that a cancelled caller still sees end."""

import asyncio

import pytest

from kvstore.outlasting import outlast


async def _cancelled_twice(task: "asyncio.Task[object]") -> None:
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()


async def test_a_caller_that_is_cancelled_again_and_again_leaves_when_the_work_is_done():
    work = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(outlast(work))
    await asyncio.sleep(0)

    await _cancelled_twice(task)
    work.set_result(1)

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_work_is_told_once_that_nobody_waits_and_what_it_raises_is_dropped():
    work = asyncio.get_running_loop().create_future()
    told = []
    task = asyncio.ensure_future(outlast(work, when_cancelled=lambda: told.append(1)))
    await asyncio.sleep(0)

    await _cancelled_twice(task)
    work.set_exception(OSError("too late"))

    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [1]


async def test_the_works_result_and_error_are_the_callers():
    work, failing = (asyncio.get_running_loop().create_future() for _ in range(2))
    work.set_result(7)
    failing.set_exception(OSError("no"))

    assert await outlast(work) == 7
    with pytest.raises(OSError, match="no"):
        await outlast(failing)
