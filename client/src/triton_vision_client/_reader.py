"""An iterator that is read beside an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Callable, Generic, Optional, TypeVar

T = TypeVar("T")


class Reader(Generic[T]):
    """Reads an iterator in one thread of its own.

    A daemon thread, unlike an executor's: a source that blocks for ever must not keep the interpreter from ending.
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._wanted: queue.SimpleQueue[Optional[asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="images", daemon=True).start()

    async def next(self) -> Optional[T]:
        """The next item; None at the end. Raises what the iterator raises."""
        future: asyncio.Future[Optional[T]] = asyncio.get_running_loop().create_future()
        self._wanted.put(future)
        return await future

    def end(self) -> None:
        """Lets the thread end, once the iterator comes back to it."""
        self._wanted.put(None)

    def _run(self) -> None:
        tell: Callable[[asyncio.Future[Any], Any], None]
        what: Any
        while (future := self._wanted.get()) is not None:
            try:
                tell, what = _give, next(self._source, None)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                tell, what = _fail, error
            with suppress(RuntimeError):  # the loop is gone
                future.get_loop().call_soon_threadsafe(tell, future, what)
            del future, what


def _give(future: asyncio.Future[Any], item: Any) -> None:
    if not future.done():
        future.set_result(item)


def _fail(future: asyncio.Future[Any], error: Any) -> None:
    if not future.done():
        future.set_exception(error)
