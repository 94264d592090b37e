"""Code that several programs use: servers, requests, answers, statistics, pages.

Bottom up: records (variants, answers, runs) - servers (one process), targets (their flags) - ask
(send, time, grade) - pool (servers that take turns) - statistics - conditions, sections
(results, described once), tables, page, program (output). demo_pair has the models that programs
take by default.
"""
