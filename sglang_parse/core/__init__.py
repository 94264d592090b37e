"""PARSE's method without SGLang: what to draft, how to verify it and what to accept.

    options        options of a request
    config         the server's settings and command-line flags
    setting        settings in flags, errors and documents; files of other programs
    segment        ends of a draft's segments; prefix k is its first k segments
    strict         tokens that must be the target's own choice
    markdown       fenced blocks of code in an answer that is being written
    question       tokens of the question about a prefix, and the verdict tokens
    judge          verdict heads: files, and verdicts from the scores of tokens
    layout         rows of a verify pass
    mask           attention masks of a verify pass
    block          rows of a draft forward that drafts several tokens
    block_accept   acceptance of such tokens on the device
    rival          whether the exact token check would be faster than the judge
    selection      accepted prefix from the verdicts
    doubt          drafts that end where the draft model is unsure
    proposals      how many tokens of a head's proposals are accepted
    eagle_gate     whether an EAGLE-3 head runs for a new request
    round          a verified draft, and what was output for it
    simulation     simulated acceptance for benchmarks
    pace           how slow forwards are now
    phases         records of a request's state machine: phases, actions, plans
    stage          wall time of a stage of one iteration
    request        state of one request and its transitions
    notes          what modules keep for one request, beside its phase and KV
    request_telemetry  what is told about one request
    request_text   a text that drafts for one request
    text_match     place of an answer in a text that may draft it
    prompt_match   place that an answer copies from, in its prompt and output
    copies         length of drafts that copy from there
    loss           what drafts of texts may lose
    arming         when a draft starts beside a decode step in flight
    answers        earlier answers by the end of a prompt or an answer
    kv_demand      actions and KV slots of the running requests in the next iteration
    certificate    certified thresholds of ``sglang-parse calibrate``
    policy         adaptive drafting
    counters       counters of requests and of the process

Only ``block_accept`` and ``mask`` import PyTorch. Nothing imports SGLang (an
import-linter contract), so everything runs and is tested without it.
"""
