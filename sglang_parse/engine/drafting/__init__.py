"""Drafting: everything the draft model does. The engine holds one ``drafter.Drafter``:

    draft_prefill.prefill_missing(model, reqs)     compute draft KV that requests lack
    draft_prefill.is_prefilled(req)          whether that is done
    chunk = drafter.start(batch, rows, before)     choose blocks for these requests
    chunk.launch(num_tokens, before)         launch forwards; on a CPU, wait for them
    chunk.can_follow(reqs)                   whether the next chunk may be launched before ``wait``
    chunk.wait(leave=0)                      wait for the tokens and add them to the drafts
    drafter.model.kv                         marks of slots with draft KV

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
