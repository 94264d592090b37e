"""Sixty requests of ten kinds, in which a text is the draft; ``measure.py`` sends them.

None was chosen by its result. The functions are of Python's standard library, as the running
Python has them: of each module that every 3.11 and 3.12 has, in alphabetical order and each once,
the first public function of 60 to 110 tokens that the kind of edit fits (a comment of four words,
three strings in single quotes, no docstring, a parameter used twice, any parameter, in this order).
The other texts were written for this file. ``other_edits`` are the next functions by the same rule.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.client.records import Item

EDITS = ("rename", "add type hints", "add a docstring", "other quotes", "translate comments")
FIRST, AGAIN = "question", "question again, changed"

RENAMES = {
    "ast.iter_fields": "the parameter node to tree",
    "calendar.leapdays": "the parameter y1 to first_year",
    "doctest.debug": "the parameter module to namespace",
    "enum.global_enum_repr": "the parameter self to member",
    "imaplib.Int2AP": "the parameter num to number",
    "linecache.getline": "the parameter lineno to line_number",
}
TYPES = (
    *("difflib.IS_CHARACTER_JUNK", "email.message_from_binary_file", "email.charset.add_alias"),
    *("email.quoprimime.body_length", "fnmatch.fnmatchcase", "ipaddress.v6_int_to_packed"),
)
DOCSTRINGS = (
    *("colorsys.rgb_to_yiq", "ctypes.PYFUNCTYPE", "gettext.dngettext"),
    *("multiprocessing.util.close_all_fds_except", "optparse.check_builtin", "pdb.find_function"),
)
QUOTES = (
    *("dis.main", "email.encoders.encode_base64", "email.utils.unquote", "filecmp.demo"),
    *("pstats.func_std_string", "pydoc.ispackage"),
)
COMMENTS = {
    "asyncio.tasks.create_task": "German",
    "copyreg.pickle": "French",
    "getpass.getuser": "Spanish",
    "glob.escape": "German",
    "inspect.getmodulename": "French",
    "locale.delocalize": "Spanish",
}

# The next functions by the same rule, on which a change of PARSE is measured that was chosen on the
# first ones.
OTHER_RENAMES = {
    "asyncio.base_futures.isfuture": "the parameter obj to value",
    "asyncio.events.set_event_loop_policy": "the parameter policy to new_policy",
    "asyncio.futures.wrap_future": "the parameter future to wrapped",
    "asyncio.tasks.sleep": "the parameter delay to seconds",
    "calendar.weekday": "the parameter year to full_year",
    "cgi.print_environ": "the parameter environ to variables",
}
OTHER_TYPES = (
    *("ast.iter_child_nodes", "asyncio.streams.open_unix_connection", "base64.standard_b64decode"),
    *("bz2.compress", "cgitb.enable", "copyreg.remove_extension"),
)
OTHER_DOCSTRINGS = (
    *("asyncio.subprocess.create_subprocess_shell", "ctypes.SetPointerType", "curses.start_color"),
    *("curses.ascii.unctrl", "email.utils.parsedate_to_datetime"),
    "encodings.base64_codec.getregentry",
)
OTHER_QUOTES = (
    *("aifc.open", "imghdr.test_jpeg", "multiprocessing.connection.address_type"),
    *("multiprocessing.reduction.sendfds", "pydoc.splitdoc", "quopri.ishex"),
)
OTHER_COMMENTS = {
    "asyncio.unix_events.waitstatus_to_exitcode": "German",
    "curses.has_key.has_key": "French",
    "email.base64mime.header_length": "Spanish",
    "encodings.punycode.T": "German",
    "http.cookiejar.request_host": "French",
    "logging.addLevelName": "Spanish",
}

DIFFS = (
    """\
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -12,5 +12,7 @@ class Cart:
     def total(self):
-        return sum(item.price for item in self.items)
+        total = sum(item.price * item.quantity for item in self.items)
+        return round(total, 2)
""",
    """\
--- a/server/retry.py
+++ b/server/retry.py
@@ -4,6 +4,7 @@ def fetch(url, attempts=3):
     for attempt in range(attempts):
         try:
             return get(url, timeout=5)
         except TimeoutError:
-            pass
+            time.sleep(2 ** attempt)
+    raise TimeoutError(f"{url}: no answer after {attempts} attempts")
""",
    """\
--- a/users/names.py
+++ b/users/names.py
@@ -1,3 +1,5 @@
 def full_name(user):
-    return user.first + " " + user.last
+    parts = [user.first, user.middle, user.last]
+    return " ".join(part for part in parts if part)
""",
    """\
--- a/config/load.py
+++ b/config/load.py
@@ -3,4 +3,6 @@ def load(path):
-    return json.loads(open(path).read())
+    if not path.exists():
+        return {}
+    return json.loads(path.read_text(encoding="utf-8"))
""",
    """\
--- a/geo/distance.py
+++ b/geo/distance.py
@@ -2,4 +2,4 @@ import math
 def distance(a, b):
-    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)
+    return math.dist(a, b)
""",
    """\
--- a/text/slug.py
+++ b/text/slug.py
@@ -1,3 +1,4 @@
 def slug(title):
-    return title.lower().replace(" ", "-")
+    words = re.findall(r"[a-z0-9]+", title.lower())
+    return "-".join(words)
""",
)
TESTS = (
    """\
def test_total_of_an_empty_cart():
    cart = Cart()
    assert cart.total() == 0
""",
    """\
def test_fetch_returns_the_first_answer(monkeypatch):
    monkeypatch.setattr(retry, "get", lambda url, timeout: "page")
    assert retry.fetch("http://example.com") == "page"
""",
    """\
def test_full_name_of_first_and_last():
    user = User(first="Ada", middle="", last="Lovelace")
    assert full_name(user) == "Ada Lovelace"
""",
    """\
def test_load_reads_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"debug": true}')
    assert load(path) == {"debug": True}
""",
    """\
def test_distance_of_equal_points():
    assert distance((1, 2), (1, 2)) == 0
""",
    """\
def test_slug_of_two_words():
    assert slug("Hello World") == "hello-world"
""",
)
"""A test that is there already, one to each diff."""

ORDER = {"customer": "string", "city": "string", "article": "string", "quantity": "integer"}
MEETING = {"topic": "string", "day": "string", "time": "string", "room": "string"}
TEXTS = (
    (
        ORDER,
        "Hello, this is Maria Gonzalez from Sevilla. Please send me 12 boxes of the blue garden "
        "tiles as soon as you can.",
    ),
    (
        MEETING,
        "Hi all, we moved the talk about the warehouse migration to Thursday at 14:30. "
        "We meet in room B204, next to the kitchen.",
    ),
    (
        ORDER,
        "Good morning! Jonas Petersen here, from the workshop in Aarhus. We need 40 steel hinges, "
        "type H-220, by the end of the month.",
    ),
    (
        MEETING,
        "Reminder: the review of the third quarter budget takes place on 9 October at 9:00 in "
        "the Rosalind Franklin Hall.",
    ),
    (
        ORDER,
        "To whom it may concern: my name is Thomas Achterberg, I live in Groningen and would like "
        "to order 3 copies of The Art of Baking Bread.",
    ),
    (
        MEETING,
        "Can everybody make it on Monday at 11 am? Topic is the new release process for mobile "
        "apps, and I booked the Jupiter room.",
    ),
)
QUESTIONS = (
    (
        "Write a Python function that reads a CSV file and returns a list of dicts.",
        "Write a Python function that reads a TSV file and returns a list of dicts.",
    ),
    (
        "How do I undo my last git commit without losing my changes?",
        "How do I undo my last two git commits without losing my changes?",
    ),
    (
        "Write an SQL query for the ten customers with the most orders in 2024.",
        "Write an SQL query for the five customers with the most orders in 2025.",
    ),
    (
        "Explain what a Python decorator is in three sentences.",
        "Explain to a beginner what a Python decorator is in three sentences.",
    ),
    (
        "Write a bash loop that converts all PNG files in a folder to JPEG.",
        "Write a bash loop that converts all PNG files in a folder to WebP.",
    ),
    (
        "Write a Dockerfile for a Flask app that listens on port 5000.",
        "Write a Dockerfile for a Flask app that listens on port 8080.",
    ),
)


def source_of(name: str) -> str:
    """A function of the standard library."""
    module, _, function = name.rpartition(".")
    return inspect.getsource(getattr(importlib.import_module(module), function))


def all_requests() -> list[Item]:
    """In the order in which they are sent; ``key`` is the kind of work."""
    found = _edits(RENAMES, TYPES, DOCSTRINGS, QUOTES, COMMENTS)
    for diff in DIFFS:
        asked = f"Write a commit message of one line for this diff.\n\n{diff}"
        found.append(_drafted("commit message", asked, diff))
    for diff, test in zip(DIFFS, TESTS, strict=True):
        asked = f"Write one more test, for what this diff changes.\n\n{diff}\nA test so far:\n\n"
        found.append(_drafted("test for a diff", asked + test, test))
    found += [_extraction(fields, text) for fields, text in TEXTS]
    first, again = zip(*QUESTIONS, strict=True)
    # No text comes with these: drafts are earlier answers of the same scope.
    for kind, questions in ((FIRST, first), (AGAIN, again)):
        found += [Item(kind, text, None, request={"cache_salt": "team"}) for text in questions]
    return found


def other_edits() -> list[Item]:
    return _edits(OTHER_RENAMES, OTHER_TYPES, OTHER_DOCSTRINGS, OTHER_QUOTES, OTHER_COMMENTS)


def _edits(
    renames: Mapping[str, str],
    types: Sequence[str],
    docstrings: Sequence[str],
    quotes: Sequence[str],
    comments: Mapping[str, str],
) -> list[Item]:
    instructions = (
        {name: f"Rename {what}" for name, what in renames.items()},
        dict.fromkeys(types, "Add type hints"),
        dict.fromkeys(docstrings, "Add a docstring of one line"),
        dict.fromkeys(quotes, "Use double quotes for all strings"),
        {name: f"Translate the comments to {language}" for name, language in comments.items()},
    )
    return [
        _edit(kind, name, instruction)
        for kind, some in zip(EDITS, instructions, strict=True)
        for name, instruction in some.items()
    ]


def _edit(kind: str, name: str, instruction: str) -> Item:
    code = source_of(name)
    asked = f"{instruction} in this code. Answer with the whole code and nothing else.\n\n{code}"
    return _drafted(kind, asked, code)


def _drafted(kind: str, asked: str, draft: str, **more: Any) -> Item:
    prediction = {"type": "content", "content": draft}
    return Item(kind, asked, None, request={"prediction": prediction, **more})


def _extraction(fields: dict[str, str], text: str) -> Item:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    schema = {"type": "object", "properties": properties, "required": [*fields]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "fields", "schema": schema}}
    asked = f"Extract {', '.join(fields)} as JSON.\n\n{text}"
    return _drafted("JSON under a schema", asked, text, response_format=form)


if __name__ == "__main__":
    for item in all_requests():
        print(json.dumps({"key": item.key, "prompt": item.text, "request": item.request}))
