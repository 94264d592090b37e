"""PD disaggregation on one machine: a stock server that prefills, and one that decodes.

SGLang's own Mooncake backend moves the KV, over ``plugins/local_transfer`` in place of Mooncake's
engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_parse.client.servers import awake, free_ports
from support.client import HTTP, Client
from support.servers import SEED, Start, plain_flags, plugin

TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")
DECODE = (*TRANSFER, "--disaggregation-mode", "decode")


@dataclass(frozen=True)
class SplitClient(Client):
    """Sends each request to both servers, as SGLang's router does; the decode server answers."""

    prefill_url: str = ""
    bootstrap_port: int = 0

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if "sampling_params" not in body and "messages" not in body:
            return super().post(path, body)
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}
        sent = {**body, **room, "bootstrap_room": random.getrandbits(62)}
        with ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(HTTP.post, f"{self.prefill_url}{path}", json=sent)
            answer = super().post(path, sent)
            prefill.result()
        return answer


def split_servers(
    start_server: Start, target: Path, name: str, flags: Sequence[str], of_target: Sequence[str]
) -> Iterator[SplitClient]:
    """A decode server behind a stock prefill server, both awake.

    Args:
        target: the folder of the prefill server's model.
        flags: the decode server's, of this name; ``of_target``: what this target needs, on both.
    """
    (port,) = free_ports(1)
    bootstrap = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    stock = (*plain_flags(target), *SEED, *of_target, *TRANSFER, *bootstrap)
    with plugin("local_transfer", HOST_IP="127.0.0.1"):
        prefill = start_server(f"{name}-prefill", *stock)
        decode = start_server(name, *flags, *DECODE)
    with awake(prefill, decode):
        client = Client.of(decode)
        yield SplitClient(client.url, client.probe, client.options, prefill.url, port)
