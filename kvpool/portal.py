"""The way from a synchronous engine to the event loop and back: submit, poll, never block.

One daemon thread runs one event loop. Jobs travel in through a deque and one coalesced wake of a sleeping task, and
come back through a deque that the engine polls. ``start_blocking_portal`` is not used: it costs ten times as much a
job and, if forgotten, keeps the interpreter from exiting.

Ownership keeps this simple: only the loop's thread takes a job off the books and reports it, so every job is reported
exactly once, and only after it has let go of everything it touches.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar, TypeVarTuple, overload

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvpool._wake import Wake
from kvpool.errors import JobCancelled, PortalClosed

__all__ = ["Done", "Portal"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Jobs the pump starts before it lets the loop breathe, so that a burst does not become one long slice.
_BURST = 64


class Done(NamedTuple):
    """The end of one job: ``error`` is None if ``result`` is what it returned."""

    token: Hashable
    result: Any
    error: BaseException | None


class _Job:
    """One submitted call. The caller's thread writes ``cancelled``; everything else is the loop's."""

    __slots__ = ("args", "cancelled", "fn", "scope", "token")

    def __init__(self, token: Hashable, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        self.token = token
        self.fn = fn
        self.args = args
        self.cancelled = False
        self.scope: CancelScope | None = None


class Portal(Generic[T]):
    """Runs async jobs for synchronous callers, on its own event loop in its own daemon thread.

    ``lifespan`` makes an async context manager that is entered on the loop before the first job and left after the
    last; its value is the first argument of every job. ``backend`` and ``backend_options`` go to :func:`anyio.run`.

    - The loop starts with the first job, or with :meth:`start`. :meth:`submit`, :meth:`poll` and :meth:`cancel` cost
      microseconds, may be called from any thread, and never wait for the loop.
    - Every job is reported by :meth:`poll` exactly once, whatever happens, and only once it has ended. A job that fails
      disturbs no other job.
    - If the lifespan cannot start, or fails later, all jobs, present and future, are reported with its error, which
      stays in :attr:`error`.
    - A portal belongs to the process that made it: in a forked child every use raises
      :class:`~kvpool.errors.PortalClosed`; make a new one there.
    - A portal that was not closed gets a second to close at interpreter exit, and never holds the exit up longer.
    """

    @overload
    def __init__(
        self: Portal[None], *, backend: str = ..., backend_options: Mapping[str, Any] | None = ..., name: str = ...
    ) -> None: ...
    @overload
    def __init__(
        self,
        lifespan: Callable[[], AbstractAsyncContextManager[T]],
        *,
        backend: str = ...,
        backend_options: Mapping[str, Any] | None = ...,
        name: str = ...,
    ) -> None: ...
    def __init__(
        self,
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
        *,
        backend: str = "asyncio",
        backend_options: Mapping[str, Any] | None = None,
        name: str = "kvpool-portal",
    ) -> None:
        self.name = name
        self._lifespan = lifespan
        self._backend = backend
        self._backend_options = dict(backend_options or {})
        self._pid = os.getpid()
        # Re-entrant, because a signal handler or a finalizer may use the portal in the middle of a submit. The loop's
        # thread takes it only at its very end, so a caller never waits for the loop.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._jobs: dict[Hashable, _Job] = {}  # submitted and not yet reported
        self._inbox: deque[_Job] = deque()
        self._done: deque[Done] = deque()
        self._waiters: deque[threading.Event] = deque()
        self._thread: threading.Thread | None = None
        self._wake: Wake | None = None
        self._closing = 0  # 1: cancel the jobs and leave the lifespan; 2: cancel that exit, too
        self._ended = False
        self._error: BaseException | None = None

    # -- the caller's side --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop now instead of with the first job. Does nothing if it was started; see :attr:`error`."""
        self._check_process()
        with self._lock:
            self._start()

    def submit(self, fn: Callable[[T, *Ts], Awaitable[object]], *args: *Ts, token: Hashable | None = None) -> Hashable:
        """Have ``await fn(value, *args)`` run on the loop, ``value`` being the lifespan's; returns the job's token.

        ``token`` names the job in :meth:`poll` and :meth:`cancel`; a number is given if it is left out. Raises
        ValueError if a job of that token has not ended yet, and PortalClosed in a forked child. A portal that is closed
        or has failed takes the job and reports it with the error.
        """
        self._check_process()
        with self._lock:
            if token is None:
                token = next(n for n in self._numbers if n not in self._jobs)
            elif token in self._jobs:
                raise ValueError(f"portal {self.name!r}: a job with token {token!r} is still running")
            if self._start() and not self._closing:
                self._jobs[token] = job = _Job(token, fn, args)
                self._post(job)
            else:
                self._report(token, None, self._reason())
        return token

    def poll(self) -> list[Done]:
        """The jobs that have ended since the last poll, in the order they ended. Never waits."""
        if self._pid != os.getpid():
            self._check_process()
        reports: list[Done] = []
        done = self._done
        while done:
            try:
                reports.append(done.popleft())
            except IndexError:  # another thread polls too
                break
        return reports

    def cancel(self, token: Hashable) -> None:
        """Cancel a job. It is still reported, with JobCancelled unless it ended before. Unknown tokens are ignored."""
        self._check_process()
        with self._lock:
            job = self._jobs.get(token)
            if job is not None and not job.cancelled:
                job.cancelled = True
                self._post(job)

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for something to poll; tells whether there is. For simple engines."""
        self._check_process()
        if not self._done:
            event = threading.Event()
            self._waiters.append(event)
            # Look again now that the loop knows the event, so that a report in between is not missed.
            if self._done or not event.wait(min(timeout, threading.TIMEOUT_MAX)):
                with suppress(ValueError, IndexError):  # not in there, or changed meanwhile: some report has it
                    self._waiters.remove(event)
        return bool(self._done)

    def close(self, timeout: float = 5.0) -> bool:
        """Cancel all jobs, leave the lifespan, end the loop; tells whether it ended within ``timeout`` seconds.

        Jobs that had not ended are reported with PortalClosed, each as soon as it has let go of what it touches. After
        False the lifespan's exit is cancelled too, the remaining jobs (see :attr:`outstanding`) are still reported when
        they end, and ``close`` may be called again. Does nothing in a forked child.
        """
        if self._pid != os.getpid():
            return True
        with self._lock:
            self._closing = self._closing or 1
            thread = self._thread
            if thread is None:
                self._finish()
                return True
            self._ring()
        if thread is threading.current_thread():
            return False
        thread.join(max(0.0, min(timeout, threading.TIMEOUT_MAX)))
        if not thread.is_alive():
            return True
        with self._lock:
            self._closing = 2
            self._ring()
        return False

    @property
    def error(self) -> BaseException | None:
        """What made the portal fail, or None. A closed portal has not failed."""
        return self._error

    @property
    def outstanding(self) -> int:
        """Jobs that have not been reported yet."""
        return len(self._jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise PortalClosed(
                f"portal {self.name!r} belongs to process {self._pid}, not to its forked child {os.getpid()};"
                " make a new Portal in the child"
            )

    def _reason(self) -> BaseException:
        return self._error or PortalClosed(f"portal {self.name!r} is closed")

    def _post(self, job: _Job) -> None:
        self._inbox.append(job)
        self._ring()

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake.ring()

    def _start(self) -> bool:
        if self._thread is None and not self._ended:
            try:
                self._wake = wake = Wake()
                thread = threading.Thread(target=self._run_thread, args=(wake,), name=self.name, daemon=True)
                thread.start()
            except (OSError, RuntimeError) as exc:  # no descriptors, or no threads, left
                self._error = exc
                self._finish()
            else:
                self._thread = thread
                _started.add(self)
        return not self._ended

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def _run_thread(self, wake: Wake) -> None:
        try:
            anyio.run(self._main, wake, backend=self._backend, backend_options=self._backend_options)
        except BaseException as exc:  # whatever it is, jobs must hear of it
            self._error = self._error or exc
        finally:
            self._finish()

    async def _main(self, wake: Wake) -> None:
        async with anyio.create_task_group() as root:
            with anyio.CancelScope() as life:
                inner = _Inner(root.cancel_scope, life)
                root.start_soon(self._pump, inner, wake)
                try:
                    async with self._lifespan() as value:
                        await self._serve(inner, value)
                except Exception as exc:
                    self._error = exc
            root.cancel_scope.cancel()
        if not self._closing and self._error is None:
            self._error = PortalClosed(f"portal {self.name!r}: its lifespan ended by itself, without an error")

    async def _serve(self, inner: _Inner, value: Any) -> None:
        """Run jobs until cancelled: by close, or by the lifespan's failure."""
        async with anyio.create_task_group() as jobs:
            try:
                inner.value, inner.jobs, inner.stop = value, jobs, jobs.cancel_scope
                for job in inner.early:
                    if not job.cancelled:
                        self._launch(inner, job)
                await anyio.sleep_forever()
            finally:
                inner.jobs = None  # no more starts: the group ends as soon as its last job does

    async def _pump(self, inner: _Inner, wake: Wake) -> None:
        taken = 0
        while True:
            while self._inbox:
                self._take(inner, self._inbox.popleft())
                taken += 1
                if taken % _BURST == 0:
                    await anyio.lowlevel.checkpoint()
            closing = self._closing
            if closing == 2:
                inner.root.cancel()
            elif closing:
                inner.stop.cancel()
            await wake.sleep(unless=partial(self._news, closing))

    def _news(self, closing: int) -> bool:
        return bool(self._inbox) or closing != self._closing

    def _take(self, inner: _Inner, job: _Job) -> None:
        if job.scope is not None:  # seen before, so this is its cancellation
            job.scope.cancel()
        elif job.cancelled:
            if self._jobs.get(job.token) is job:
                self._report(job.token, None, _cancelled(job))
        elif inner.jobs is None:
            inner.early.append(job)
        else:
            self._launch(inner, job)

    def _launch(self, inner: _Inner, job: _Job) -> None:
        assert inner.jobs is not None
        job.scope = anyio.CancelScope()
        inner.jobs.start_soon(self._run, inner.value, job, job.scope)

    async def _run(self, value: Any, job: _Job, scope: CancelScope) -> None:
        result: Any = None
        try:
            with scope:
                result = await job.fn(value, *job.args)
        except anyio.get_cancelled_exc_class():
            if anyio.current_effective_deadline() != -math.inf:
                # Nobody cancelled this task: the job leaked a cancellation of its own (a cancelled future, say).
                self._report(job.token, None, _cancelled(job))
            else:
                if self._closing:
                    self._report(job.token, None, self._reason())
                # Else the lifespan failed; why is known only when it has been left, so _finish() reports.
                raise
        except BaseException as exc:  # SystemExit of a job, too, is that job's alone
            self._report(job.token, None, exc)
        else:
            self._report(job.token, result, _cancelled(job) if scope.cancelled_caught else None)

    def _report(self, token: Hashable, result: Any, error: BaseException | None) -> None:
        self._jobs.pop(token, None)
        self._done.append(Done(token, result, error))
        while self._waiters:
            try:
                self._waiters.popleft().set()
            except IndexError:  # another thread reports too (a submit that is refused)
                break

    def _finish(self) -> None:
        """The end: report what is left, once no job runs any more. Under the lock no job can slip in behind it."""
        with self._lock:
            self._ended = True
            for token in list(self._jobs):
                self._report(token, None, self._reason())
            self._inbox.clear()
            if self._wake is not None:
                self._wake.close()
                self._wake = None


class _Inner:
    """What lives on the loop only."""

    __slots__ = ("early", "jobs", "root", "stop", "value")

    def __init__(self, root: CancelScope, stop: CancelScope) -> None:
        self.root = root
        self.stop = stop  # what close() cancels: the lifespan while it is being entered, then the jobs, never its exit
        self.value: Any = None
        self.jobs: TaskGroup | None = None  # where jobs run, while the lifespan stands
        self.early: list[_Job] = []  # jobs that came before


def _cancelled(job: _Job) -> JobCancelled:
    return JobCancelled(f"job {job.token!r} was cancelled" if job.cancelled else f"job {job.token!r} cancelled itself")


# -- interpreter exit -------------------------------------------------------------------------------------------------

_started: weakref.WeakSet[Portal[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Give portals that nobody closed one second in all, so that native calls do not run into the interpreter's end."""
    end = time.monotonic() + 1.0
    for portal in list(_started):
        portal.close(end - time.monotonic())
