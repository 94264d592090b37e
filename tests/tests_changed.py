import random
def changed(text, fraction, seed=1):
    rng = random.Random(seed); lines = text.splitlines(keepends=True)
    for i in range(len(lines)):
        if rng.random() < fraction: lines[i] = lines[i].replace("e", "a").replace("1", "2")
    return "".join(lines)
