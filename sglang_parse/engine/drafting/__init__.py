"""Drafting: everything the draft model does. The engine holds one ``drafter.Drafter``, and asks
``draft_prefill`` for draft KV that requests lack before they draft.

Modules, callers first:

    drafter          chooses the kind of block, starts chunks
    token_by_token   chunks of decode steps
    parallel         chunks of blocks
    block_graphs     a block as one CUDA graph
    block_kernels    what it does around the model's forward
    chunk            common part of both kinds of chunk
    draft_prefill    missing draft KV
    draft_model      the SGLang worker and its forwards
    draft_head       its EAGLE-3 head, which proposes candidates of blocks
    batches          forwards as SGLang's batches
    kv_marks         KV slots that hold the draft model's KV
"""
