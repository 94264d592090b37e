"""``sglang-parse load``: what requests wait for while others are served beside them.

``bench_serving`` divides the time between two chunks by the tokens in the second, which hides that
nothing came for a while. Here a closed loop sends streamed requests and keeps when each chunk came.

stream.py sends one request and notes its chunks, stages.py reads what the server's stages took;
names.py tells simulated servers apart; figures.py makes figures of all; run.py is the order of
events.
"""
