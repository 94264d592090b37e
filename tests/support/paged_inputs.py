"""Inputs of a paged attention kernel for a verify pass, and the reference output.

Random queries, keys and values for the rows of a ``VerifyLayout``, laid out three ways that must
agree: ``masked`` (one masked sequence per request), ``aliased`` (a causal sequence per question,
its page table naming slots others wrote) and ``separate`` (a causal pass of its own per question,
nothing shared). ``expected`` is plain SDPA in fp32 and knows neither pages nor masks; ``attend``
reads the inputs as FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper.plan`` documents them.

Needs torch alone: the GPU tests hand the same inputs to the kernels, a test on the CPU to
``attend``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang_parse.core.layout import RequestLayout, VerifyLayout

ROWS_AT_A_TIME = 256
"""Rows of the reference per step: 2,048 rows over 10,000 columns in fp32 are too large at once."""
UNWRITTEN = 1000.0
"""Fills the slots that belong to no request; zero times a weight of zero."""
MaskBuilder = Callable[[VerifyLayout, torch.device], torch.Tensor | None]


@dataclass(frozen=True)
class Heads:
    """Shape of one attention layer."""

    num_qo: int
    num_kv: int
    dim: int


@dataclass(frozen=True)
class RequestTensors:
    """One request's rows. ``columns`` are ``RequestLayout``'s: the context, then the rows.

    Attributes:
        queries: [num_rows, num_qo, dim].
        keys, values: [kv_len, num_kv, dim].
    """

    layout: RequestLayout
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def sequences(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, columns they end): the draft, then each question after its prefix.

        Each is an ordinary prompt whose last tokens are the rows: causal, and nothing else.
        """
        layout, device = self.layout, self.keys.device
        start = layout.prefix_len
        draft = torch.arange(start + layout.num_draft_rows, device=device)
        yield slice(0, layout.num_draft_rows), draft
        for cut, first, size in zip(
            layout.visible_lens, layout.question_starts, layout.question_lens, strict=True
        ):
            question = torch.arange(start + first, start + first + size, device=device)
            yield slice(first, first + size), torch.cat((draft[: start + cut], question))


@dataclass(frozen=True)
class PagedInputs:
    """One launch of a paged prefill kernel; n sequences, CSR offsets in int32.

    Attributes:
        queries: [qo_indptr[-1], num_qo, dim].
        key_cache, value_cache: [num_pages, page_size, num_kv, dim] ("NHD").
        qo_indptr, kv_indptr: [n + 1] offsets into the queries and into ``kv_indices``.
        kv_indices: [kv_indptr[-1]] pages.
        last_page_len: [n] slots used of each sequence's last page, 1 to page_size.
        custom_mask: bool [sum of rows * columns], query first; None is causal, aligned to the
            right: a sequence's last row sees all its columns.
    """

    queries: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    custom_mask: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.key_cache.shape[1]

    def kv_lens(self) -> list[int]:
        """[n] columns of each sequence."""
        num_pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        return ((num_pages - 1) * self.page_size + self.last_page_len).tolist()


def random_tensors(
    layout: VerifyLayout, heads: Heads, dtype: torch.dtype, device: torch.device | str, seed: int
) -> list[RequestTensors]:
    """Normal entries: scores spread by 1, so that a row's columns differ in weight."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, num_heads: int) -> torch.Tensor:
        shape = rows, num_heads, heads.dim
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return [
        RequestTensors(
            request,
            normal(request.num_rows, heads.num_qo),
            normal(request.kv_len, heads.num_kv),
            normal(request.kv_len, heads.num_kv),
        )
        for request in layout.requests
    ]


# -- the three layouts ----------------------------------------------------------------


def masked(
    batch: Sequence[RequestTensors], page_size: int, mask: MaskBuilder, seed: int = 0
) -> PagedInputs:
    """One sequence per request with PARSE's mask, its pages anywhere in the cache."""
    device = batch[0].keys.device
    layout = VerifyLayout.of([request.layout for request in batch])
    pages = _shuffled_pages([request.layout.kv_len for request in batch], page_size, seed)
    key_cache, value_cache = _caches(batch, pages, page_size)
    return PagedInputs(
        torch.cat([request.queries for request in batch]),
        key_cache,
        value_cache,
        _int32(layout.qo_indptr, device),
        _indptr([len(own) for own in pages], device),
        torch.cat(pages).to(device),
        _int32([(r.layout.kv_len - 1) % page_size + 1 for r in batch], device),
        mask(layout, device),
    )


def aliased(batch: Sequence[RequestTensors], seed: int = 0) -> PagedInputs:
    """One sequence per question over its prefix's slots and its own; page size 1."""
    device = batch[0].keys.device
    slots = _shuffled_pages([request.layout.kv_len for request in batch], 1, seed)
    key_cache, value_cache = _caches(batch, slots, 1)
    queries, tables = [], []
    for request, own in zip(batch, slots, strict=True):
        for rows, columns in request.sequences():
            queries.append(request.queries[rows])
            tables.append(own.to(device)[columns])
    return PagedInputs(
        torch.cat(queries),
        key_cache,
        value_cache,
        _indptr([len(rows) for rows in queries], device),
        _indptr([len(table) for table in tables], device),
        torch.cat(tables),
        torch.ones(len(tables), dtype=torch.int32, device=device),
    )


def separate(batch: Sequence[RequestTensors], page_size: int) -> Iterator[PagedInputs]:
    """One launch per question and one per draft, each with its own pages: K separate passes."""
    for request in batch:
        for rows, columns in request.sequences():
            alone = RequestTensors(
                RequestLayout(len(columns) - (rows.stop - rows.start), rows.stop - rows.start),
                request.queries[rows],
                request.keys[columns],
                request.values[columns],
            )
            yield masked([alone], page_size, lambda _layout, _device: None, seed=rows.start)


def _shuffled_pages(kv_lens: Sequence[int], page_size: int, seed: int) -> list[torch.Tensor]:
    """Returns each sequence's pages, int32; a page between them belongs to none."""
    counts = [-(-size // page_size) for size in kv_lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed))
    return list(order[: sum(counts)].to(torch.int32).split(counts))


def _caches(
    batch: Sequence[RequestTensors], pages: Sequence[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten slots hold large values: a kernel that attends to one fails the comparison."""
    num_pages = 1 + sum(map(len, pages))
    caches = []
    for name in ("keys", "values"):
        first: torch.Tensor = getattr(batch[0], name)
        cache = first.new_full((num_pages * page_size, *first.shape[1:]), UNWRITTEN)
        for request, own in zip(batch, pages, strict=True):
            slots = (own[:, None].long() * page_size + torch.arange(page_size)).flatten()
            written = slots[: request.layout.kv_len].to(cache.device)
            cache[written] = getattr(request, name)
        caches.append(cache.view(num_pages, page_size, *first.shape[1:]))
    return caches[0], caches[1]


def _indptr(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return _int32(list(accumulate(counts, initial=0)), device)


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# -- answers --------------------------------------------------------------------------


def expected(batch: Sequence[RequestTensors]) -> torch.Tensor:
    """[total rows, num_qo, dim] in fp32, in the order of the masked layout's rows.

    Every question over a copy of its own prompt's keys and values.
    """
    return torch.cat(
        [
            _causal(request.queries[rows], request.keys[columns], request.values[columns])
            for request in batch
            for rows, columns in request.sequences()
        ]
    )


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The queries are the last rows of the prompt that the keys belong to."""
    first = len(keys) - len(queries)
    column = torch.arange(len(keys), device=keys.device)
    rows = column[first:, None]
    parts = [
        _sdpa(part, keys, values, column <= row)
        for part, row in zip(queries.split(ROWS_AT_A_TIME), rows.split(ROWS_AT_A_TIME), strict=True)
    ]
    return torch.cat(parts)


def attend(inputs: PagedInputs, window: int | None = None) -> torch.Tensor:
    """Returns [qo_indptr[-1], num_qo, dim] in fp32: the kernel's output, from its own inputs.

    ``window``: how many columns before its own a row of a causal sequence attends to, if not all.
    """
    parts = []
    mask_start = 0
    for i, kv_len in enumerate(inputs.kv_lens()):
        pages = inputs.kv_indices[int(inputs.kv_indptr[i]) : int(inputs.kv_indptr[i + 1])].long()
        keys = inputs.key_cache[pages].flatten(0, 1)[:kv_len]
        values = inputs.value_cache[pages].flatten(0, 1)[:kv_len]
        queries = inputs.queries[int(inputs.qo_indptr[i]) : int(inputs.qo_indptr[i + 1])]
        if inputs.custom_mask is None:
            first = kv_len - len(queries)
            allowed = torch.ones(len(queries), kv_len, dtype=torch.bool).tril(first)
            if window is not None:
                allowed = allowed.triu(first - window)
        else:
            size = len(queries) * kv_len
            allowed = inputs.custom_mask[mask_start : mask_start + size].view(-1, kv_len)
            mask_start += size
        parts.append(_sdpa(queries, keys, values, allowed.to(keys.device)))
    return torch.cat(parts)


def _sdpa(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """[rows, num_qo, dim] in fp32 from ``allowed`` [rows, columns]."""
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (queries, keys, values))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    with sdpa_kernel(SDPBackend.MATH):  # in plain fp32 on a GPU too
        answer = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=allowed
        )
    return answer[0].transpose(0, 1)


def worst_error(answer: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error of one row and head, relative: |answer - reference| / |reference|.

    What a kernel rounds to ``dtype`` (each probability, then the result; its sums are fp32) comes
    to 0.4 ``torch.finfo(dtype).eps``, for 2 columns as for 8,000 (computed for head_dim 128). One
    column too many or too few among n of like weight comes to 1 / sqrt(n), and the worst head
    gives that column several times the mean weight.
    """
    error = (answer.float() - reference.float()).norm(dim=-1) / reference.float().norm(dim=-1)
    return error.nan_to_num(torch.inf).max().item()
