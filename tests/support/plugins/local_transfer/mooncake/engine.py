"""Mooncake's transfer engine for servers on one machine: memory written through a socket.

SGLang's own Mooncake backend (``sglang.srt.disaggregation.mooncake``) runs unchanged above it. The
real engine needs a library of InfiniBand even for TCP. One call writes ranges of this process's
memory to registered ranges of another's, and returns when they are there.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

HEAD, RANGE = struct.Struct("<Q"), struct.Struct("<QQ")
OK, REFUSED = b"\x00", b"\x01"


class TransferEngine:
    """As ``mooncake.engine.TransferEngine``, as far as SGLang calls it; 0 is success."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._listener = socket.socket()

    def initialize(self, hostname: str, _handshake: str, _protocol: str, _device: str) -> int:
        self._listener.bind((hostname, 0))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self._listener.getsockname()[1]

    def batch_register_memory(self, starts: Sequence[int], lengths: Sequence[int]) -> int:
        self._regions.update(zip(starts, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, starts: Sequence[int]) -> int:
        for start in starts:
            self._regions.pop(start, None)
        return 0

    def batch_transfer_sync_write(
        self,
        session: str,
        sources: Sequence[int],
        targets: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        host, port = session.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(HEAD.pack(len(targets)))
            for target, length in zip(targets, lengths, strict=True):
                peer.sendall(RANGE.pack(target, length))
            for source, length in zip(sources, lengths, strict=True):
                peer.sendall(ctypes.string_at(source, length))
            return 0 if peer.recv(1) == OK else -1

    def _accept(self) -> None:
        with suppress(OSError):  # closed when the process ends
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._receive, args=(peer,), daemon=True).start()

    def _receive(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            (count,) = HEAD.unpack(stream.read(HEAD.size))
            ranges = [RANGE.unpack(stream.read(RANGE.size)) for _ in range(count)]
            if not all(self._is_registered(*one) for one in ranges):
                peer.sendall(REFUSED)
                return
            for target, length in ranges:
                ctypes.memmove(target, stream.read(length), length)
            peer.sendall(OK)

    def _is_registered(self, target: int, length: int) -> bool:
        return any(
            start <= target and target + length <= start + size
            for start, size in self._regions.items()
        )
