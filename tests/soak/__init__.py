"""Thousands of mixed requests to one PARSE server: no error, no leak, no wrong byte (`make soak`).

load.py makes the requests, faults.py checks an answer, drive.py sends the requests over httpx
(some are aborted or disconnected midway), run.py is the program.
"""
