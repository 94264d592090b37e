"""Asks another server for drafts, through its OpenAI API, in a thread of its own.

The thread runs an event loop; the scheduler only looks at what has arrived. It runs in the
scheduler's process, so an event must be cheap: aiohttp takes 21 us, httpx 53 us, the openai package
284 us. aiohttp also bounds lines and compressed bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_parse.core.selection import matching_tokens

CONNECT_S = 2.0
"""Most seconds to connect."""
MAX_DRAFT_S = 120.0
"""Most seconds that one draft may take in all."""
MAX_CHARS = 1 << 16
"""Characters of one draft; what comes after them is not read."""
MAX_BYTES = 1 << 20
"""Bytes of an answer that is not streamed."""
NO_TEXT = re.compile("[\ud800-\udfff\ufffd]")
"""Halves of characters: a lone surrogate, or what stands for bytes that are none."""

LAST_WORD, MAX_HELD = re.compile(r"\s*\S*\Z"), 16
"""The end of a draft that is not used before more has arrived, and its longest in characters: its
tokens may change with what follows."""

Encode = Callable[[str, str], Sequence[int]]
"""(text before, draft) -> the draft's tokens."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What an endpoint is to continue.

    Attributes:
        messages: (role, text) of a chat's; empty for a prompt.
        prompt_ids, answer_ids: the target's tokens of the prompt, and of the answer so far.
        max_tokens, temperature: of the draft.
    """

    messages: Sequence[tuple[str, str]]
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    max_tokens: int
    temperature: float


@dataclass(slots=True)
class Stream:
    """A draft on its way; written by the client's thread, read by the scheduler's.

    Attributes:
        token_ids: the target's tokens of what has arrived.
        is_complete: nothing will be added; ``ends_answer``: because the answer ends there.
        fault: why there is no more; ``is_refused``: because of what was asked, as a 4xx says;
            ``is_late``: because it took too long.
        taken: the tokens that the scheduler has; ``is_wanted``: it has taken what there was.
        waits_since: ``time.monotonic`` since when its request waits; 0 while it does not.
    """

    token_ids: Sequence[int] = ()
    is_complete: bool = False
    ends_answer: bool = False
    fault: str = ""
    is_refused: bool = False
    is_late: bool = False
    taken: list[int] = field(default_factory=list)
    is_wanted: bool = True
    waits_since: float = 0.0
    task: Any = None

    def take(self) -> tuple[Sequence[int], bool]:
        """Tokens that have arrived since the last call, and whether those before have changed, as
        the last ones may when more text follows: then nothing can be added."""
        token_ids, count, self.is_wanted = self.token_ids, len(self.taken), True
        if [*token_ids[:count]] != self.taken:
            return (), True
        added = [*token_ids[count:]]
        self.taken += added
        return added, False

    def close(self) -> None:
        """No request waits for it any more."""
        if self.task is not None:
            self.task.cancel()


class EndpointError(Exception):
    """An endpoint's answer is no draft; the text says why, without its contents. ``status``: of
    HTTP, if it has one."""

    def __init__(self, text: str, status: object = None) -> None:
        super().__init__(text)
        self.is_refusal = isinstance(status, int) and 400 <= status < 500


class EndpointClient:
    """Client of one server.

    Args:
        url: of the server, with or without ``/v1``.
        decode: text of token ids.
        encode: see ``Encode``.
        timeout_s: most seconds between two parts of a draft.
    """

    def __init__(
        self, url: str, decode: Callable[[Sequence[int]], str], encode: Encode, timeout_s: float
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._decode, self._encode = decode, encode
        self._timeout = aiohttp.ClientTimeout(
            total=MAX_DRAFT_S, connect=CONNECT_S, sock_read=max(1.0, 4 * timeout_s)
        )
        self.arrived = threading.Event()
        self._session: aiohttp.ClientSession | None = None
        self._model = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="parse-drafts", daemon=True).start()

    def ask(self, wanted: DraftRequest) -> Stream:
        """Asks for a draft; returns at once."""
        stream = Stream()
        stream.task = asyncio.run_coroutine_threadsafe(self._fill(stream, wanted), self._loop)
        return stream

    async def _fill(self, stream: Stream, wanted: DraftRequest) -> None:
        try:
            before = await asyncio.to_thread(self._decode, wanted.answer_ids)
            if NO_TEXT.search(before[-1:]):  # half a character, which no text continues
                return
            text = ""
            async for part, ends_answer in self._parts(wanted, before):
                text += part
                half = NO_TEXT.search(text)
                kept = text[: half.start()] if half else text[:MAX_CHARS]
                is_last = ends_answer is not None or len(kept) < len(text)
                if not is_last and not stream.is_wanted:
                    continue  # to be tokenized with the next part
                stream.is_wanted = False
                stream.token_ids = self._tokens(before, kept, is_last=is_last)
                if is_last:
                    stream.ends_answer = bool(ends_answer) and len(kept) == len(text)
                    break
                self.arrived.set()
        except asyncio.CancelledError:
            raise
        except EndpointError as error:
            stream.fault, stream.is_refused = str(error), error.is_refusal
        except (aiohttp.ClientError, OSError) as error:
            stream.fault = type(error).__name__  # its text may hold a part of the contents
            has_connected = not isinstance(error, aiohttp.ConnectionTimeoutError)
            stream.is_late = isinstance(error, TimeoutError) and has_connected
            self._model = ""
        except Exception as error:  # noqa: BLE001 - garbage of any kind
            stream.fault = f"{type(error).__name__} in its answer"
        finally:
            stream.is_complete = True
            self.arrived.set()

    def _tokens(self, before: str, text: str, *, is_last: bool) -> Sequence[int]:
        """The text's tokens; unless it is the last, those that do not depend on its last word."""
        ids = self._encode(before, text)
        if is_last:
            return ids
        sure = text[:-MAX_HELD] + LAST_WORD.sub("", text[-MAX_HELD:], count=1)
        return ids[: matching_tokens(ids, self._encode(before, sure))]

    async def _parts(
        self, wanted: DraftRequest, before: str
    ) -> AsyncIterator[tuple[str, bool | None]]:
        """Yields (text, whether the answer ends there; None while it goes on)."""
        path, body = await self._request(wanted, before)
        session = await self._connected()
        post = session.post(f"{self.url}{path}", json=body, allow_redirects=False)
        async with post as response:
            if response.status != 200:
                self._model = ""
                raise EndpointError(f"status {response.status}", response.status)
            if "event-stream" not in response.headers.get("content-type", ""):
                text, reason = _read(await _json(response), "message")
                yield text, reason == "stop"
                return
            async for line in response.content:
                data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                if line.startswith(b"data:") and data:
                    text, reason = _read(json.loads(data), "delta")
                    yield text, None if reason is None else reason == "stop"
            yield "", False

    async def _request(self, wanted: DraftRequest, before: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": await self._model_name(),
            "stream": True,
            "max_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
        }
        if not wanted.messages:
            prompt = await asyncio.to_thread(self._decode, wanted.prompt_ids)
            return "/v1/completions", {**body, "prompt": prompt + before}
        turns = [*wanted.messages]
        if before:
            turns.append(("assistant", before))
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        body["messages"] = [{"role": role, "content": text} for role, text in turns]
        return "/v1/chat/completions", body

    async def _model_name(self) -> str:
        """The model that it serves; looked up once, and again after a failure."""
        if not self._model:
            session = await self._connected()
            async with session.get(f"{self.url}/v1/models", allow_redirects=False) as response:
                if response.status != 200:  # refuses all requests, whatever the status
                    raise EndpointError(f"status {response.status} of /v1/models")
                content = await _json(response)
            self._model = str(content["data"][0]["id"])
        return self._model

    async def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # as many as there are requests
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session


async def _json(response: aiohttp.ClientResponse) -> Any:
    """A whole body, which may come in several pieces."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            raise EndpointError(f"more than {MAX_BYTES} bytes in its answer")
    return json.loads(body)


def _read(content: Any, kind: str) -> tuple[str, str | None]:
    """(text, finish reason) of a response or a part of one."""
    if error := content.get("error"):
        raise EndpointError("an error in its answer", error.get("code"))
    choices = content.get("choices") or [{}]
    choice = choices[0]
    text = choice["text"] if "text" in choice else (choice.get(kind) or {}).get("content")
    reason = choice.get("finish_reason")
    if not isinstance(text, str | None) or not isinstance(reason, str | None):
        raise EndpointError("no text in its answer")
    return text or "", reason
