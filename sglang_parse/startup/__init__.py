"""Start-up: what cannot work is refused before a model is loaded, with setting, value and fix.

The way through it, in the launcher (``plugin.validate_server_args``):

    compat      is this the SGLang that PARSE was built for? by its version, and by
    seams       the table of what PARSE calls, overrides or reads of it
    checks      SGLang's settings, the layout; then fills in what PARSE sets
    models      folders, shapes and tokenizers of target, draft and EAGLE-3 head
    questions   the question: the one given, or a built-in one that fits the target

In the scheduler, ``questions`` and ``checks`` give the worker its question and layout, and
``fallback`` says of each request whether PARSE can serve it faithfully.
"""
