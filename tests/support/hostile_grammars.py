"""Grammars that force a million characters, text without an end, or half a character."""

import json

OTHER_SCRIPTS = "(\u00e9|\u00df|\u65e5|\u672c|\u8a9e|\U0001f600|\U0001d11e){24}"
GRAMMARS = {
    "a million": {"regex": "a{1000000}"},
    "no end": {"ebnf": 'root ::= "a" root'},
    "pattern": {"json_schema": json.dumps({"type": "string", "pattern": "^a{3000000}$"})},
    "enum": {"json_schema": json.dumps({"enum": ["\u00e9", "\u00e8", "\u00ea"]})},
    "scripts": {"regex": OTHER_SCRIPTS},
    "fixed text": {
        "regex": "(oui|non), \u00e7a va tr\u00e8s bien \u2014 \u65e5\u672c\u8a9e\u3067\u8a71"
    },
}
