"""The method, without SGLang: what is asked, judged and kept of a draft. In a round's order:

    config      the settings, and what one request may ask for
    segment     a draft's natural ends; prefix k is its first k segments
    question    the tokens that ask whether a prefix is right, and the two verdict tokens
    layout      the rows of a verification pass: half-open intervals, and who owns each
    mask        which row sees which column
    block       a draft forward of several tokens: its rows
    block_accept   which of its candidates are accepted, and which come next
    plans       which layout of a block pays now
    selection   verdicts to the cut
    simulation  a cut at a wanted share instead, for benchmarks
    phases      the words of a request's state machine: phases, moves, what it can be told
    request     one request's state, and every change of it
    slots       who moves how far in the next iteration, and with how many KV slots
    prices      what stages take, by their size
    cuts        where drafts were cut: how far the next ones are likely to be right
    agreement   what a rejected draft is still worth
    accounts    both, by threshold
    limits      what the settings leave to decide
    planner     the fastest plan, from prices and an account
    reading     whether an EAGLE-3 head reads along with a request
    controller  whether, how far and how to draft now, from all of these
    counters       what is counted on the way
    reference   the slow truth, which packed passes are tested against

Tensors are in ``mask`` and ``reference`` only. Nothing here imports SGLang (an import-linter
contract), so all of it runs, and is tested, with PyTorch alone.
"""
