"""Shipped test tools: conformance suites for third parties, and stores that fail on purpose.

The suites need ``pip install 'kvpool[testing]'``; :mod:`kvpool.testing.faults` needs nothing more than kvpool.
"""

import sys

if "pytest" in sys.modules:  # failing assertions in a suite then show their values, as in the test files that use it
    _stores = ("stores", "store_machine", "_store_suite", "_store_values", "_store_life")
    _suites = (*_stores, "transports", "remote_transports", "_lookups", "codecs")
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{name}" for name in _suites))
