"""SGLang's server arguments beside PARSE: each was looked at, and each refused one is refused."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from support.server_settings import REFUSED_BY_SGLANG, SERVED, WITHOUT_EFFECT

pytestmark = pytest.mark.compat


def defaults() -> dict[str, object]:
    """SGLang's declared defaults, with what its resolution makes of some of them on a CPU."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    found = {field.name: field.default for field in record_fields(ServerArgs)}
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))
    return found | {
        "device": "cpu",
        "attention_backend": "torch_native",
        "cuda_graph_config": graphs,
    }


def refused() -> set[str]:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.fields.spec import Spec

    from sglang_parse.startup import checks

    of_others = {field.name for field in record_fields(Spec)} - checks._OF_DRAFTS
    return checks._ALLOWED.keys() | of_others


def test_every_server_argument_was_looked_at():
    groups = [*SERVED.values(), REFUSED_BY_SGLANG, *WITHOUT_EFFECT.values()]
    counts = Counter([*" ".join(groups).split(), *refused()])
    assert [name for name, count in counts.items() if count > 1] == []
    assert counts.keys() - defaults().keys() == set(), "not in this SGLang"
    assert defaults().keys() - counts.keys() == set(), "served, refused, or without effect?"


def test_each_refused_argument_is_refused_by_name():
    from sglang_parse.startup.checks import check_settings
    from sglang_parse.startup.models import AdmissionError, flag_of

    check_settings(SimpleNamespace(**defaults()))
    for name in sorted(refused()):
        args = SimpleNamespace(**{**defaults(), name: "another value"})
        with pytest.raises(AdmissionError, match=rf"^PARSE: {flag_of(name)} is 'another value'"):
            check_settings(args)
