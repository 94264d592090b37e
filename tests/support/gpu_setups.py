"""GPU setups of PARSE: attention backend, layout, further flags."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("flashinfer", "triton", "fa3")
DTYPE = "bfloat16"
"""SGLang's normalisation kernels for CUDA have no fp32 (``sgl_kernel.rmsnorm``)."""
PREFILL_GRAPHS = ("--cuda-graph-bs-prefill", "16", "64", "256", "1024", "4096")
"""SGLang's default is 58 sizes, most of a server's start."""
ALL_REPLAY = ("--cuda-graph-bs-prefill", *(str(2**n) for n in range(2, 13)))
"""Every forward of 2 to 4,096 rows fills half of one of them, as SGLang wants it."""


@dataclass(frozen=True)
class Setup:
    """A setup; ``flags`` in addition to the backend's and the layout's."""

    backend: str
    layout: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.backend, self.layout, *self.flags)).replace("--", "")

    @property
    def on_gpu(self) -> tuple[str, ...]:
        """They come last and override the CPU's flags."""
        return (
            *("--device", "cuda", "--attention-backend", self.backend, "--dtype", DTYPE),
            *("--sampling-backend", "pytorch", "--cuda-graph-max-bs-decode", "16"),
            *PREFILL_GRAPHS,
            *self.flags,
        )


SETUPS = (
    Setup("flashinfer", "auto"),
    Setup("flashinfer", "mask"),
    Setup("flashinfer", "alias"),
    Setup("triton", "auto"),
    Setup("triton", "mask"),
    Setup("triton", "alias"),
    Setup("fa3", "auto"),
    Setup("fa3", "alias"),
    Setup("flashinfer", "mask", ("--page-size", "16")),
    Setup("flashinfer", "alias", ("--page-size", "16")),
    Setup("flashinfer", "mask", ("--disable-cuda-graph",)),
    Setup("triton", "alias", ("--disable-cuda-graph",)),
    *(Setup(backend, "auto", ("--parse-overlap", "off")) for backend in BACKENDS),
)
"""With CUDA graphs and the overlap schedule, unless their flags disable them."""

REAL_SIZES = tuple(
    Setup(
        backend,
        "auto",
        (
            *("--cuda-graph-max-bs-decode", "64", "--max-running-requests", "64"),
            *("--max-total-tokens", "1000000", "--chunked-prefill-size", "8192"),
            *("--context-length", "36864"),
        ),
    )
    for backend in BACKENDS
)
"""Realistic batch and prompt sizes: verify passes larger than a prefill chunk."""

VARIANTS = {
    "sampler": Setup("flashinfer", "auto", ("--sampling-backend", "flashinfer")),
    "deterministic": Setup("flashinfer", "auto", ("--enable-deterministic-inference",)),
    "fp8 kv": Setup("flashinfer", "auto", ("--kv-cache-dtype", "fp8_e5m2")),
    "tight": Setup("flashinfer", "auto", ("--max-total-tokens", "2000")),
}
"""Each runs other kernels, or with few KV slots."""
