"""Shipped test tools: conformance suites for third parties, and stores that fail on purpose.

The suites need ``pip install 'kvpool[testing]'``; :mod:`kvpool.testing.faults` needs nothing more than kvpool.
"""

import sys

if "pytest" in sys.modules:  # failing assertions in a suite then show their values, as in the test files that use it
    sys.modules["pytest"].register_assert_rewrite("kvpool.testing.stores", "kvpool.testing.store_machine")
