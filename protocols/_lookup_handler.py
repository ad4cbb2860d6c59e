"""How every transport runs a lookup handler: bounded in time, and never the end of the service."""

from __future__ import annotations

import logging
import math

import anyio

from kvpool._options import redact
from kvpool.protocols._lookup_wire import Code, Fault
from kvpool.transport import LookupHandler, LookupRequest, LookupResult

__all__ = ["Handling"]

log = logging.getLogger(__name__)


class Handling:
    """Runs the lookups of one server. ``address``: of the server, for messages. ``failures``: of the handler."""

    def __init__(self, handler: LookupHandler, address: str) -> None:
        self.failures = 0
        self._handler = handler
        self._address = address

    async def run(self, request: LookupRequest, deadline: float) -> LookupResult | Fault | None:
        """The checked result, the fault that the client is told, or None after ``deadline`` (on the loop's clock)."""
        with anyio.CancelScope(deadline=deadline):
            try:
                result = await self._handler(request)
                if not isinstance(result, LookupResult):
                    raise TypeError(f"it returned {type(result).__name__} instead of LookupResult")
                result.check(request.num_tokens)
            except Exception as error:
                return self._failed(error)
            except anyio.get_cancelled_exc_class():
                if anyio.current_effective_deadline() == -math.inf:
                    raise
                # Nobody cancelled this task: it would end the service without a word.
                return self._failed(RuntimeError("the handler cancelled itself"))
            return result
        return None

    def _failed(self, error: Exception) -> Fault:
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:  # 1, 2, 4, 8 ...: a store that is away does not flood the log
            log.error("%s: the lookup handler failed, %d times so far", self._address, self.failures, exc_info=error)
        return Fault(Code.HANDLER, redact(f"the lookup handler failed: {type(error).__name__}: {error}"))
