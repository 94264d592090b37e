"""What all programs are made of, so that each idea is there once.

From below: records (a variant, an answer, a run) - servers (one process) and targets (the flags of every
way to serve) - ask (send, time, grade) - pool (servers that take turns) - match (who plays when) -
figures (statistics, the limit, figures and their marks) - conditions, tables, page, program (what
is shown, written and returned). demo_pair is the pair that programs take where nobody names one.
"""
