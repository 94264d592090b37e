"""PARSE's objects of one process, for code that SGLang calls with its own objects only.

Patches, the future map and the metrics collector find the pipeline and the counters here; all other
code is passed them. (Settings travel in the environment, see ``core.config``.)

SGLang calls PARSE in this order; each line names the patch or the class it goes through.

In the launcher, before any process starts:

    flags and settings                 patches/parse/cli_flags.py
    errors of the start                patches/parse/start_errors.py
    models, resolved settings          patches/parse/start_checks.py
    LoRA with PARSE                    patches/parse/lora_admitted.py
    ``plugin.validate_server_args``    SGLang's registry of algorithms
    the server's port                  patches/parse/port.py

In the scheduler, once:

    ``plugin.create_worker``           SGLang's registry; for others patches/cpu/guard_cpu.py
    size of the KV pool                patches/parse/draft_kv_pool.py
    class of the draft model           patches/parse/draft_models.py
    pool of recurrent states           patches/parse/state_pool.py
    attention backends, CUDA graphs    patches/parse/decode_graphs.py
    radix cache                        patches/parse/head_prefixes.py

For each request:

    OpenAI's ``prediction``, usage     patches/parse/predictions.py
    a chat's messages                  patches/parse/chat_messages.py
    sampling parameters                patches/parse/request_options.py
    token ids and limits               patches/parse/request_bounds.py
    ``return_sampling_mask``           patches/parse/sampling_mask.py
    ``receive``                        patches/parse/arrivals.py

For each decode iteration:

    ``take_prefilled``                 ``algorithm``, on a server that only decodes
    requests to remove early           patches/parse/whole_batches.py
    ``slots_required``, ``plan``       patches/parse/kv_by_phase.py
    ``note_allocated``                 patches/parse/draft_kv_marks.py
    ``resolve_seq_lens_cpu``           ``engine.overlap``, the future map
    ``forward_batch_generation``       ``engine.worker.ParseWorker``
    latent attention of a pass         patches/parse/latent_passes.py
    logits of a pass                   patches/parse/pass_logits.py
    ``finish``, by the result's event  ``engine.overlap``
    stops                              patches/parse/stops.py
    ``free_lookahead``                 by the same patch
    which requests have news           patches/parse/empty_events.py
    ``meta_info`` of a response        patches/parse/meta_info.py
    metrics                            ``telemetry.prometheus.ParseMetricsCollector``
    log line                           patches/parse/decode_log.py

For each event of a stream, in the other processes:

    text of new tokens                 patches/parse/streamed_text.py
    tool calls                         patches/parse/tool_blocks.py
    Ollama's API                       patches/parse/ollama_streams.py

On demand: patches/parse/weight_updates.py, patches/parse/memory_release.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from sglang_parse.core.counters import Counters

if TYPE_CHECKING:
    from sglang_parse.engine.overlap import Pipeline


@dataclass(slots=True)
class Context:
    """PARSE's objects of one process.

    Attributes:
        counters: totals over its requests.
        pipeline: set by the worker; None in processes without one.
        loads_mtp: the checkpoint that SGLang reads is to be an MTP layer.
        target_rows, draft_rows: tokens of the target's embedding, 0 until a draft model is loaded;
            and of the draft model's checkpoint, 0 where they are as many.
    """

    counters: Counters = field(default_factory=Counters)
    pipeline: Pipeline | None = None
    loads_mtp: bool = False
    target_rows: int = 0
    draft_rows: int = 0

    def running_pipeline(self) -> Pipeline:
        """Returns the pipeline; raises RuntimeError in a process without PARSE's worker."""
        if self.pipeline is None:
            raise RuntimeError("PARSE: requests are served in a process without PARSE's worker")
        return self.pipeline


@lru_cache(maxsize=1)
def process_context() -> Context:
    return Context()
