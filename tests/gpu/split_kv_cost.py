"""Split-KV attention beside SGLang's extend kernel on a GPU: right, and in what time.

    PYTHONPATH=. python tests/gpu/split_kv_cost.py [--seconds 55]

Checks both kernels against fp32, tunes the constants of ``sglang_parse.attention.split_kv`` on a
few shapes, and prints the time of one layer for all: SGLang's kernel, the constants as they are,
the best ones. KV comes from memory, not from the L2 cache, as behind the rest of a model. Without
a GPU, ``TRITON_INTERPRET=1 ... --tiny`` checks smaller shapes and tries out the rest (its times
mean nothing). Needs no other module of the tests.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sglang.kernels.ops.attention import extend_attention
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from sglang_parse.attention import split_kv
from sglang_parse.attention.split_kv import SplitKV
from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import qlen_only_mask

STARTED = time.perf_counter()
CONSTANTS = ("MAX_BLOCK", "TILE", "WARPS", "STAGES", "PROGRAMS_PER_SM")
LAYERS, REPLAYS = 28, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def elapsed() -> float:
    return time.perf_counter() - STARTED


@dataclass(frozen=True)
class Shape:
    """A call's sizes.

    Attributes:
        contexts: tokens before the rows of each request.
        lens: rows of each request, where they differ; the last one's may be padding.
        page: slots that lie together.
        kv_dtype: of the caches; None: as the rest.
    """

    heads: int
    kv_heads: int
    dim: int
    rows: RequestLayout
    contexts: tuple[int, ...]
    lens: tuple[int, ...] = ()
    page: int = 1
    kv_dtype: torch.dtype | None = None

    @property
    def width(self) -> int:
        return self.rows.num_rows

    @property
    def counts(self) -> tuple[int, ...]:
        return self.lens or (self.width,) * len(self.contexts)

    def __str__(self) -> str:
        kind = "causal" if self.rows.is_causal else "mask"
        rows = ",".join(map(str, self.lens)) or str(self.width)
        sizes = f"{self.heads}/{self.kv_heads} heads of {self.dim}, {rows} rows ({kind})"
        contexts = sorted(set(self.contexts))
        more = f", pages of {self.page}" if self.page > 1 else ""
        more += f", {self.kv_dtype}" if self.kv_dtype else ""
        return f"{sizes}, {len(self.contexts)} x {','.join(map(str, contexts))}{more}"


def chain(width: int) -> RequestLayout:
    return RequestLayout(0, width)


def block(size: int, masks: Masks = Masks.EVERY) -> RequestLayout:
    return BlockKind(size, masks).rows(0)


LENGTHS = (0, 1, split_kv.TILE - 1, split_kv.TILE, 333)
"""Padding is a request without context."""
TINY = [
    Shape(2, 2, 64, block(3), LENGTHS),
    Shape(4, 2, 80, block(4, Masks.LAST), LENGTHS),
    Shape(10, 2, 128, chain(17), (0, 130)),
    Shape(4, 2, 128, block(6), (split_kv.TILE + 1, 0)),
    Shape(5, 1, 64, block(4), (3 * split_kv.TILE + 5,)),
    Shape(2, 1, 80, chain(70), (333, 7)),
    Shape(1, 1, 16, chain(1), (5, 0)),
    # Rows of a graph, of whichever request; the last request is padding.
    Shape(4, 2, 64, chain(64), (333, 7, 65, 0, 0), (25, 1, 1, 0, 37)),
    Shape(10, 2, 128, chain(48), (0, 130, 0), (33, 15, 0), kv_dtype=torch.float8_e4m3fn),
    Shape(4, 2, 64, block(4), (70, 333), page=16, kv_dtype=torch.float8_e5m2),
    # More parts, the longer a context is.
    Shape(2, 1, 16, block(3), (4 * split_kv.LONG + 5, split_kv.LONG, split_kv.LONG - 1, 70)),
    Shape(2, 1, 16, chain(16), (2 * split_kv.LONG - 1, 9000, 0), (9, 5, 2)),
]
CHECKED = [
    *TINY,
    Shape(16, 8, 128, block(8), (*LENGTHS, 2048)),
    Shape(40, 8, 128, chain(33), (*LENGTHS, 8192)),
    Shape(40, 8, 128, chain(129), LENGTHS),
    Shape(4, 2, 256, chain(9), LENGTHS),
]


def grid() -> Iterator[Shape]:
    """Head dimensions, groups, pages and KV dtypes; a few long contexts."""
    lens = (17, 1, 6, 8)
    chains, blocks = [], []
    for dim, group in itertools.product((64, 80, 128, 192, 256), (1, 2, 5, 8, 16)):
        chains.append(Shape(group, 1, dim, chain(sum(lens)), (70, 333, 0, 0), lens, page=16))
        blocks.append(Shape(group, 1, dim, block(3), (70, 1, 0), kv_dtype=torch.float8_e4m3fn))
    yield from chains
    yield from blocks if DEVICE == "cuda" else blocks[::2]
    for dim, page in ((64, 1), (256, 16)):
        yield Shape(8, 1, dim, chain(16), (32_768, 0), (9, 7), page)
        yield Shape(2, 1, dim, block(3), (32_768,), page=page, kv_dtype=torch.float8_e4m3fn)


class Inputs:
    """A call's tensors, random; the slots lie in no order in a cache of their own.

    Args:
        caches: [layers, 2, slots, KV heads, head_dim], of which each call takes the next layer.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, caches: torch.Tensor | None = None
    ) -> None:
        self.shape, num_rows, page = shape, sum(shape.counts), shape.page
        context_sum = sum(shape.contexts)
        num_slots = -(-(context_sum + 1) // page) * page
        if caches is None:
            caches = torch.randn(1, 2, num_slots, shape.kv_heads, shape.dim, device=DEVICE).to(
                dtype
            )
        self.caches, self._layer = caches, 0
        with torch.device(DEVICE):
            self.q = torch.randn(num_rows, shape.heads, shape.dim).to(dtype)
            self.k, self.v = torch.randn(2, num_rows, shape.kv_heads, shape.dim).to(dtype)
            self.out = torch.full_like(self.q, math.nan)
            starts = torch.tensor([0, *itertools.accumulate(shape.contexts)])
            pages = torch.randperm(num_slots // page)[:, None] * page + torch.arange(page)
            self.slots = pages.flatten()[:context_sum]
            sizes = [shape.width * (length + shape.width) for length in shape.contexts]
            self.mask_indptr = torch.tensor([0, *itertools.accumulate(sizes)])
            self.qo_indptr = torch.tensor([0, *itertools.accumulate(shape.counts)])
        self.scales = (0.5, 2.0) if shape.kv_dtype else (1.0, 1.0)
        self.caches = self.caches.to(shape.kv_dtype or dtype)
        self.kv_indptr = starts.to(torch.int32)
        self.tail = qlen_only_mask(shape.rows, DEVICE).to(torch.uint8)

    def _mask(self, *, is_stock: bool) -> torch.Tensor | None:
        """Of the new rows; SGLang's with the context's part, which would hide all of it."""
        if self.shape.rows.is_causal or not is_stock:
            return None if self.shape.rows.is_causal else self.tail.flatten()
        rows = [torch.nn.functional.pad(self.tail, (length, 0)) for length in self.shape.contexts]
        return torch.cat([part.flatten() for part in rows])

    def run(self, kernel: Callable[..., None]) -> torch.Tensor:
        """Calls it as SGLang's backend does."""
        keys, values = self.caches[self._layer]
        self._layer = (self._layer + 1) % len(self.caches)
        mask = self._mask(is_stock=kernel is extend_attention_fwd)
        kernel(
            *(self.q, self.k, self.v, self.out, keys, values),
            *(self.qo_indptr, self.kv_indptr, self.slots, mask, True, self.mask_indptr),
            *(self.shape.width, *self.scales, self.shape.dim**-0.5),
            logit_cap=0.0,
            sliding_window_size=-1,
            sinks=None,
            window_kv_offsets=None,
            xai_temperature_len=-1,
            page_size=1,
            score_mod=None,
            aux_tensors=None,
            extend_seq_lens_cpu=None,
        )
        return self.out

    def expected(self) -> torch.Tensor:
        """float [rows, heads, dim], from the first layer's cache."""
        shape, group, found = self.shape, self.shape.heads // self.shape.kv_heads, []
        for i, slots in enumerate(self.slots.split(shape.contexts)):
            rows, count = slice(*self.qo_indptr[i : i + 2].tolist()), shape.counts[i]
            if not count:  # padding of a graph that is full
                continue
            seen = qlen_only_mask(chain(count) if shape.lens else shape.rows, DEVICE)
            keys, values = (
                torch.cat((cache[slots].float() * scale, new[rows])).repeat_interleave(group, 1)
                for cache, new, scale in zip(
                    self.caches[0], (self.k.float(), self.v.float()), self.scales, strict=True
                )
            )
            scores = torch.einsum("rhd,chd->hrc", self.q[rows].float(), keys) * shape.dim**-0.5
            scores[:, :, len(slots) :].masked_fill_(~seen, -math.inf)
            found.append(torch.einsum("hrc,chd->rhd", scores.softmax(-1), values))
        return torch.cat(found)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this call was left to SGLang's kernel")


def split_of(shape: Shape, stock: Callable[..., None] = refuse) -> SplitKV:
    heads = shape.heads, shape.kv_heads, shape.dim
    most = sum(shape.lens)
    sizes = shape.width, len(shape.contexts), max(shape.contexts)
    split = SplitKV(stock, *sizes, heads, DEVICE, most)
    if most:
        split.plan(torch.tensor(shape.lens, device=DEVICE), most)
    split._partial.fill_(math.nan)  # of a request that is gone
    split._lse.fill_(math.nan)
    return split


def mend_interpreter() -> None:
    """Its products take the bits of bf16 for integers (Triton 3.8)."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def as_float(part: Any) -> Any:
        if part.dtype.scalar != tl.bfloat16:
            return part
        wide = interpreter._convert_float(part.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(wide.view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return multiply(self, as_float(left), as_float(right), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def check(shapes: Iterable[Shape], dtype: torch.dtype) -> bool:
    """Whether all are right: rounding to bf16 comes to less than 0.02, in SGLang's kernel, too."""
    shapes = [*shapes]
    torch.manual_seed(0)
    all_right = True
    limit = 1e-5 if dtype == torch.float32 else 0.02
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        limit *= 2  # the interpreter cuts off what a GPU rounds
    all_inputs = [Inputs(shape, dtype) for shape in shapes]
    compile_all(itertools.product([DEFAULT], all_inputs))
    for shape, inputs in zip(shapes, all_inputs, strict=True):
        split, expected = split_of(shape), inputs.expected()
        error = (inputs.run(split.extend_attention_fwd) - expected).abs().max().item()
        stock = "-"
        if DEVICE == "cuda":
            inputs.out.fill_(math.nan)
            stock = f"{(inputs.run(extend_attention_fwd) - expected).abs().max().item():.1e}"
        is_right = error < limit * inputs.scales[1]  # not so a NaN
        verdict, all_right = "right" if is_right else "WRONG", all_right and is_right
        print(f"{verdict} to {error:.1e} (SGLang's {stock}): {shape}", flush=True)
    return all_right


def check_what_is_sglangs() -> None:
    """What the kernels cannot do reaches SGLang's, with its arguments."""
    shape = Shape(2, 1, 16, chain(3), (5, 2))
    inputs, called = Inputs(shape, torch.float32), []
    split = split_of(shape, lambda *args, **options: called.append((args, options)))

    def leaves(change: dict[str, Any], **options: Any) -> bool:
        def changed(*args: Any, **given: Any) -> None:
            call = split_kv._Call(*args)._replace(**change)
            split.extend_attention_fwd(*call, **(given | options))

        called.clear()
        inputs.run(changed)
        return bool(called)

    half = inputs.caches[0, 0].to(torch.float16)
    assert not leaves({})
    for change in ({"is_causal": False}, {"k_scale": 0.5}, {"v_scale": 0.5}, {"k_cache": half}):
        assert leaves(change), change
    ragged = {"q": inputs.q[1:], "k": inputs.k[1:], "v": inputs.v[1:]}
    of_head = {name: getattr(inputs, name) for name in "qkv"}
    of_head |= dict(zip(("k_cache", "v_cache"), inputs.caches[0], strict=True))
    more_heads = {name: part.repeat(1, 64, 1) for name, part in of_head.items()}
    for change in (ragged, more_heads, {"v": inputs.v[:, :, :8]}):
        assert leaves(change), change
    for option, value in {
        "logit_cap": 30.0,
        "sliding_window_size": 4,
        "sinks": torch.zeros(2),
        "window_kv_offsets": torch.zeros(2),
        "xai_temperature_len": 8,
        "score_mod": refuse,
        "skip_prefix_custom_mask": False,
        "lse_extend": torch.zeros(2),
    }.items():
        assert leaves({}, **{option: value}), option
        assert called[0][1][option] is value
    split._shared_memory = 1 << 10
    assert leaves({})
    with pytest.raises(NotImplementedError):
        leaves({"mask": inputs.tail})
    print("SGLang's kernel does the rest", flush=True)


def check_parts() -> None:
    """A short context has as many parts as where no context is long; a longer one has more."""

    def parts(*contexts: int) -> list[int]:
        """Of each context: those that have tokens."""
        shape = Shape(1, 1, 16, chain(2), contexts)
        split = split_of(shape)
        Inputs(shape, torch.float32).run(split.extend_attention_fwd)
        num_parts, _ = split._num_parts(2 * len(contexts), 2)
        weights = split._lse[: 2 * len(contexts) * num_parts].view(-1, 2, num_parts)[:, 0]
        return (weights.isfinite().sum(1) - 1).tolist()  # one is the new rows'

    length = split_kv.LONG
    short, other = parts(length - 1, 5000)
    assert short == other > 1
    assert parts(length - 1, length) == [short, 2 * short]
    assert parts(8 * length, length - 1)[1] == short
    most = parts(8 * length, length - 1)[0]
    assert 2 * short <= most <= split_kv.MAX_LONG_SPLITS
    print(f"parts of contexts grow from {short} to {most}", flush=True)


# -- time ---------------------------------------------------------------------


class Clock:
    """Times of one layer. ``caches`` of all shapes are in one pool, random once."""

    def __init__(self, pool_bytes: int, dtype: torch.dtype) -> None:
        self._pool = torch.empty(pool_bytes // dtype.itemsize, dtype=dtype, device=DEVICE)
        self._pool.normal_()
        self._flush = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)

    def inputs(self, shape: Shape) -> Inputs:
        size = 2, sum(shape.contexts) + 1, shape.kv_heads, shape.dim
        layers = min(len(self._pool) // math.prod(size), LAYERS)
        caches = self._pool[: layers * math.prod(size)].view(layers, *size)
        return Inputs(shape, self._pool.dtype, caches)

    def microseconds(self, inputs: Inputs, kernel: Callable[..., None]) -> float:
        if DEVICE == "cpu":
            start = time.perf_counter()
            inputs.run(kernel)
            return (time.perf_counter() - start) * 1e6
        inputs.run(kernel)  # compiles
        torch.cuda.synchronize()
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                inputs.run(kernel)
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()  # nothing stays in the L2 cache
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / LAYERS * 1e3)
        return statistics.median(times)


@dataclass(frozen=True)
class Setting:
    """Values of ``CONSTANTS``."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(f"{n}={v}" for n, v in zip(CONSTANTS, self.values, strict=True))

    def __enter__(self) -> None:
        for name, value in zip(CONSTANTS, self.values, strict=True):
            setattr(split_kv, name, value)

    def __exit__(self, *_: Any) -> None:
        for name, value in zip(CONSTANTS, DEFAULT.values, strict=True):
            setattr(split_kv, name, value)


DEFAULT = Setting(tuple(getattr(split_kv, name) for name in CONSTANTS))


def compile_all(work: Iterable[tuple[Setting, Inputs]]) -> None:
    """Compiles in threads what the work needs; what fails, fails again where it runs."""

    class Warmup:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *args, **options: self._kernel.warmup(*args, grid=grid, **options)

    if DEVICE == "cpu":
        return
    start = elapsed()
    kernels = [
        (split_kv, "attend_part"),
        (split_kv, "combine"),
        (extend_attention, "_fwd_kernel"),
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as patches:
        for module, name in kernels:
            patches.enter_context(mock.patch.object(module, name, Warmup(getattr(module, name))))
        patches.enter_context(triton.AsyncCompileMode(pool, ignore_errors=True))
        for setting, inputs in work:
            inputs.run(extend_attention_fwd)
            with setting:
                inputs.run(split_of(inputs.shape, extend_attention_fwd).extend_attention_fwd)
    print(f"-- compiled for {elapsed() - start:.0f} s", flush=True)


def measured(clock: Clock, inputs: Inputs, setting: Setting) -> float:
    """Microseconds; infinite where the GPU cannot hold the tiles."""
    with setting:
        try:
            split = split_of(inputs.shape)
            return clock.microseconds(inputs, split.extend_attention_fwd)
        except Exception as error:  # noqa: BLE001 - the other settings are measured, whatever it is
            print(f"no {setting}: {error!r:.200}", flush=True)
            return math.inf


def best_of(
    clock: Clock, settings: list[Setting], all_inputs: list[Inputs], until: float
) -> Setting:
    """The setting with the least geometric mean, among those that time allowed; prints the best."""
    found = dict[Setting, list[float]]()
    for setting in settings:
        if found and elapsed() > until:
            print(f"out of time: {len(found)} of {len(settings)} settings tried", flush=True)
            break
        found[setting] = [measured(clock, inputs, setting) for inputs in all_inputs]
    means = {s: statistics.fmean(map(math.log, times)) for s, times in found.items()}
    ranked = sorted(means, key=lambda setting: means[setting])
    print("tuned on", *(inputs.shape for inputs in all_inputs), sep="\n  ")
    for setting in [*ranked[:6], *([DEFAULT] if DEFAULT in found else [])]:
        times = " ".join(f"{t:7.1f}" for t in found[setting])
        print(f"  {math.exp(means[setting]):7.1f} us: {times}  {setting}", flush=True)
    for place, inputs in enumerate(all_inputs):
        times, setting = min(((found[s][place], s) for s in found), key=lambda pair: pair[0])
        print(f"  best: {times:7.1f} us  {setting}: {inputs.shape}", flush=True)
    return ranked[0]


def timed_shapes(is_tiny: bool) -> Iterator[Shape]:
    models = [(16, 8, (block(8), block(8, Masks.LAST)), (1, 8, 16))]
    models.append((40, 8, tuple(map(chain, (17, 33, 129))), (1, 4, 16)))
    for heads, kv_heads, layouts, sizes in models[: 1 if is_tiny else 2]:
        for rows, num_reqs in itertools.product(layouts, sizes[: 1 if is_tiny else 3]):
            for context in (32,) if is_tiny else (128, 512, 2048, 8192):
                yield Shape(heads, kv_heads, 128, rows, (context,) * num_reqs)


def settings_of(is_tiny: bool) -> list[Setting]:
    """The default first: it is measured whatever the time. Others would spill registers."""
    tiles = ((64, 64, 4), (64, 32, 4), (64, 64, 8), (64, 128, 8), (64, 32, 8), (128, 64, 8))
    grid = itertools.product((*tiles, (128, 32, 8)), (2, 3, 1))
    found = [Setting((*tile, stages, DEFAULT.values[-1])) for tile, stages in grid]
    return list(dict.fromkeys([DEFAULT, *found]))[: 2 if is_tiny else None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55.0, help="tuning ends in time for it")
    parser.add_argument("--tiny", action="store_true", help="small shapes, two settings")
    parser.add_argument("--grid", action="store_true", help="check many shapes in both dtypes")
    parser.add_argument("--check", action="store_true", help="no times")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if DEVICE == "cpu":
        mend_interpreter()
    check_what_is_sglangs()
    check_parts()
    is_right = check(TINY if options.tiny else CHECKED, dtype)
    for place, kind in enumerate((torch.bfloat16, torch.float16)) if options.grid else ():
        # The interpreter takes minutes: half of them in each dtype.
        step = 1 if DEVICE == "cuda" else 2
        is_right &= check(itertools.islice(grid(), place % step, None, step), kind)
    print(f"-- checked after {elapsed():.0f} s", flush=True)
    if options.check:
        sys.exit(not is_right)

    clock = Clock(1 << (26 if options.tiny else 32), dtype)
    shapes, settings = list(timed_shapes(options.tiny)), settings_of(options.tiny)
    tuned_on = [shapes[0]]
    if not options.tiny:
        tuned_on = [
            Shape(16, 8, 128, block(8), (384,)),
            Shape(16, 8, 128, block(8), (2048,) * 8),
            Shape(40, 8, 128, chain(17), (2048,)),
            Shape(40, 8, 128, chain(17), (512,) * 16),
        ]
    tuned_inputs = [clock.inputs(shape) for shape in tuned_on]
    compile_all(itertools.product(settings, tuned_inputs))
    best = best_of(clock, settings, tuned_inputs, options.seconds * 0.65)
    spread = [best, *(Setting((*best.values[:-1], programs)) for programs in (1, 4, 8))]
    best = best_of(
        clock, spread[: 2 if options.tiny else None], tuned_inputs, options.seconds * 0.7
    )
    compile_all(itertools.product((DEFAULT, best), map(clock.inputs, shapes)))
    print(f"-- tuned after {elapsed():.0f} s: default {DEFAULT}, best {best}", flush=True)

    print("us of a layer:  SGLang  default     best")
    ratios = []
    for shape in shapes:
        if elapsed() > options.seconds:
            print("out of time: shapes are left", flush=True)
            break
        inputs = clock.inputs(shape)
        stock = clock.microseconds(inputs, extend_attention_fwd)
        default, tuned = (measured(clock, inputs, setting) for setting in (DEFAULT, best))
        ratios.append(stock / tuned)
        print(f"{stock:22.1f} {default:8.1f} {tuned:8.1f}  {shape}", flush=True)
    if ratios:
        print(f"{statistics.geometric_mean(ratios):.2f} times as fast as SGLang's, geometric mean")
    print(f"-- done after {elapsed():.0f} s")
    print(f"BEST {best}")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
