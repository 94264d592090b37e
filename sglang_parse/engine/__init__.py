"""The engine: decode iterations of a PARSE server, from SGLang's scheduler to its result.

To follow one verify iteration, read these files in this order:

    worker      what SGLang's scheduler calls
    overlap     iterations in flight: plan, launch, finish in SGLang's order
    step        one iteration: plan -> draft -> verify -> accept -> move on
    schedule    plan: the action and the KV slots of every request
    verify      the target's verify pass, and its result per request
    forward     the rows of a forward under PARSE's layout
    commit      accepts and outputs tokens, and moves requests to their next phase
    result      the result that SGLang processes

Beside them:

    sources        where drafts come from: the draft model, or texts (a package)
    drafting       everything the draft model does (a package)
    logits         what changes logits, samples them, and keeps probabilities (a package)
    judge          verdicts on a draft's prefixes: from a question, a head, or both (a package)
    row_results    what rows of logits say: choices, verdicts, scores, log probabilities
    eagle          an EAGLE-3 head that accelerates the target's decode steps
    eagle_head     an EAGLE-3 head as SGLang loads it, of the target or of the draft model
    states         recurrent states of a hybrid target, and how they return after a pass
    pass_graphs    verify passes and the draft model's prefills as CUDA graphs
    step_graphs    passes of few rows as SGLang's CUDA graphs of decode steps
    wide_graphs    CUDA graphs of forwards with one width, or of so many rows
    graph_check    whether they are right and faster on this GPU
    graph_memory   what they keep on a GPU
    target         the target's prefill and decode forwards through SGLang
    prefill        prompts and first tokens
    prewarm        what runs before the first request
    admission      how a request is served, decided before its prefill
    build          builds the engine's parts
    parts          the engine's parts
    requests       queries of a request
    batch          views of SGLang's batch
    timing         stage times
    broadcast      one decision for all tensor-parallel ranks
    trace          why a round ended as it did, for requests that keep a trace
    faults         what ends a request, and what ends the server
    sglang_types   fields of SGLang's objects that PARSE relies on

Calls go down an import-linter contract's layers only, in a running server too
(``tests/e2e/test_call_direction.py``). A request's phase and KV change in ``core.request`` only.
"""
