"""Start-up checks: an unsupported server is refused before a model is loaded, with the fix.

In the launcher, ``plugin.validate_server_args`` calls, in this order:

    compat      the SGLang version, and what is patched in it
    checks      SGLang's settings and the layout; sets the fields that PARSE determines
    models      folders, shapes and tokenizers of target and draft
    heads       an EAGLE-3 head or MTP layer
    questions   the question: the one that is set, or a built-in one that fits the target

Before SGLang configures the models, the patch ``start_checks`` checks their paths and attention by
``models``, and when all settings are resolved, these again by ``checks``. ``report`` shows errors
as one line.

In the scheduler, ``questions`` and ``checks`` give the worker its question and layout, and
``fallback`` decides for each request whether it is served by plain decoding.
"""
