"""Logits: everything that changes them, chooses a token from them, or keeps their probabilities.

Logits of the target's verify passes, decode steps and prefills, and of the draft model, come here
in this order:

    rows        whose rows they are, and which tokens are in front of each
    grammar     which tokens a constrained request's draft, and the target, may choose
    adjust      what requests' parameters change in them; asks ``grammar``
    sampling    SGLang's sampler, row by row, and how sure a model is of its choices
    logprobs    log probabilities of output tokens
"""
