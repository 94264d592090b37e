"""Sources of drafts. The engine holds one ``chain.SourceChain``, which asks them in order:

    chain.receive(req)            a request arrives: its texts are prepared while it waits
    chain.poll(reqs)              what has become ready joins the requests' texts
    chain.resume(req)             the same, of a request that waits for a text
    chain.start(req)              starts the next draft, of the first source that has one
    chain.observe(req, ...)       tells the draft's source how it was verified

A source is a ``source.DraftSource``: the draft model, an EAGLE-3 head, or a text. Whatever the
source, what is verified are the target's tokens.

Modules, callers first:

    chain             the sources of one server, in order
    draft_model       the draft model as a source
    endpoint          drafts of another server
    endpoint_client   asks that server
    answers           drafts from earlier answers
    forced            drafts of text that a grammar forces
    eagle             the EAGLE-3 head as a source
    text              drafts from texts
    incoming          texts on their way, tokenized by another thread
    source            the interface
"""
