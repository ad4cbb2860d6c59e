"""Replay of recorded request traffic against a store, through the same facade that engines use.

:mod:`~kvpool.replay.trace` reads a trace, :mod:`~kvpool.replay.blocks` says what every block must hold,
:mod:`~kvpool.replay.engine` plays the engine, :mod:`~kvpool.replay.run` starts one, or several as
:mod:`~kvpool.replay.processes`, and :mod:`~kvpool.replay.report` adds up what they say.
"""
