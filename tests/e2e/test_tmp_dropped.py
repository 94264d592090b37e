"""How many decode steps in flight predictions drop."""
import sys
from collections.abc import Iterator
import pytest
from support.client import Client, parse_info
from support.demo_pair import DEMO, held_out
from support.servers import AHEAD, OVERLAP, PARSE, SEED, Start, served
from tests_changed import changed
PROBLEMS = held_out(6)

@pytest.fixture(scope="module")
def server(start_server: Start) -> Iterator[Client]:
    yield from served(start_server, "dropped", "--model-path", str(DEMO / "draft"), *PARSE,
        "--parse-verification", "token", *SEED, *OVERLAP, **AHEAD)

def test_count(server: Client):
    right = server.generate_all([p.prompt for p in PROBLEMS], 6, max_new_tokens=160)
    for always in (False, True):
      for fraction in (0.0, 0.1, 0.3, 0.6):
        for conc in (1, 6):
            before = server.look()["overlap"]; rounds = tokens = matched = drafted = 0
            import concurrent.futures as cf
            def ask(i):
                o = {"draft": changed(right[i]["text"], fraction)} | ({"drafting": "always"} if False else {})
                return server.generate(PROBLEMS[i].prompt, parse=o, max_new_tokens=160)
            with cf.ThreadPoolExecutor(conc) as pool:
                out = list(pool.map(ask, range(6)))
            for i, a in enumerate(out):
                assert a["output_ids"] == right[i]["output_ids"]
                s = parse_info(a)["sources"].get("prediction", {})
                rounds += s.get("rounds", 0); matched += s.get("accepted_tokens", 0); drafted += s.get("drafted_tokens", 0); tokens += len(a["output_ids"])
            grown = {k: v - before[k] for k, v in server.look()["overlap"].items()}
            print(f"COUNT changed {fraction} at {conc}: drafts {rounds}, accepted {matched}/{drafted}, output {tokens}, dropped {grown['dropped']} = {grown['dropped']/max(1,rounds):.2f} a draft; async {grown['async_decodes']} launched {grown['launched']}", file=sys.stderr)
      break
