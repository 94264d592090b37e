"""The servers of ``tests/gpu``: flags SGLang has, layouts PARSE allows."""

import pytest

from sglang_parse.attention.support import choose_layout
from sglang_parse.client.servers import COMMON_FLAGS
from support.gpu_setups import DTYPE, REAL_SIZES, SETUPS, VARIANTS, Setup

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("setup", [*SETUPS, *REAL_SIZES, *VARIANTS.values()], ids=str)
def test_sglang_knows_the_flags_and_the_last_ones_win(setup: Setup):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    flags = [*COMMON_FLAGS, "--model-path", "any", *setup.on_gpu]
    args = prepare_server_args(flags)
    assert (args.device, args.attention_backend) == ("cuda", setup.backend)
    assert args.dtype == DTYPE
    chosen, _ = choose_layout(setup.layout, setup.backend, args.page_size or 1)
    assert setup.layout in ("auto", chosen)
