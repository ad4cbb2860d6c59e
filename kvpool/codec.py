"""The contract of a hash codec: how block hashes travel inside a lookup request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import Buffer

from kvpool.hashes import BlockHashes

__all__ = ["HashCodec"]


class HashCodec(ABC):
    """Turns block hashes into one frame and back; stateless, built without arguments.

    Framing, versions, size limits of a message and deadlines belong to the transport. ``encode`` and ``decode`` raise
    nothing but :class:`~kvpool.errors.HashError`, whatever they are given.
    """

    #: Short ASCII name that both ends compare ("binary").
    name: ClassVar[str]

    @abstractmethod
    def encode(self, hashes: BlockHashes) -> Sequence[Buffer]:
        """The frame that holds every digest of ``hashes``, in pieces that the transport joins.

        Pieces spare a copy: they may show the memory of ``hashes`` itself, and are used before anything else happens.
        """

    @abstractmethod
    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        """The hashes of a frame, without a copy where the form allows it. Raises :class:`~kvpool.errors.HashError`."""
