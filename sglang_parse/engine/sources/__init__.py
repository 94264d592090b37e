"""Sources of drafts. The engine holds one ``chain.SourceChain``, which asks them in order.

A source is a ``source.Source``: the draft model, an EAGLE-3 head, or a text. Whatever the source,
what is verified are the target's tokens.

Modules, callers first:

    chain             the sources of one server, in order
    draft_model       the draft model as a source
    prediction        drafts from predicted outputs
    prompt            drafts that copy from the prompt and the output so far
    endpoint          drafts of another server
    endpoint_client   asks that server
    answers           drafts from earlier answers
    forced            drafts of text that a grammar forces
    eagle             the EAGLE-3 head as a source
    text              drafts from texts
    incoming          texts on their way, tokenized by another thread
    source            what a source is, and may do
"""
