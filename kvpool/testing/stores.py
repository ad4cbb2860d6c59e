"""The contract of :class:`kvpool.store.Store` as tests that a backend's author gets by subclassing one class.

::

    class TestMyStore(StoreConformance[Path]):
        @contextmanager
        def place(self):            # a fresh, empty place for values
            with TemporaryDirectory() as root:
                yield Path(root)

        def store(self, place): return MyStore(place)
        def raw_read(self, place, key): ...
        def raw_write(self, place, key, value): ...

The raw hooks go around the store under test, so that one mistake in it cannot hide another. Needs pytest, hypothesis
and trio: ``pip install 'kvpool[testing]'``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.testing._store_life import LifeTests
from kvpool.testing._store_suite import Damage, P, get, put, value_of
from kvpool.testing._store_values import ValueTests
from kvpool.testing.store_machine import machine_for

__all__ = ["Damage", "StoreConformance", "get", "put", "value_of"]


class StoreConformance(ValueTests[P], LifeTests[P]):
    """Subclass it in a test module, under a name that pytest collects; its hooks are those of ``StoreSuite``."""

    def test_any_sequence_of_calls_fits_the_model(self, anyio_backend: str) -> None:
        run_state_machine_as_test(
            machine_for(self, anyio_backend),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
