"""The layout of a server's verify passes, and the backends that are refused."""

import pytest
import torch

from sglang_parse.attention.support import (
    SUPPORT,
    BackendError,
    check_backends,
    check_device,
    check_kv,
    choose_layout,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("setting", "backend", "page_size", "layout"),
    [
        ("auto", "torch_native", 1, "mask"),
        ("auto", "flashinfer", 16, "alias"),
        ("mask", "flashinfer", 16, "mask"),
        ("auto", "triton", 64, "mask"),
        ("auto", "fa3", 1, "alias"),
        ("alias", "torch_native", 16, "alias"),
        ("alias", "flashinfer", 16, "alias"),
        ("alias", "triton", 1, "alias"),
        ("mask", "triton", 1, "mask"),
    ],
)
def test_the_layout_and_its_reason(setting: str, backend: str, page_size: int, layout: str):
    chosen, why = choose_layout(setting, backend, page_size)
    assert chosen == layout
    assert why == (SUPPORT[backend].why if setting == "auto" else "--parse-layout asks for it")


@pytest.mark.parametrize(
    ("setting", "page_size", "message"),
    [
        ("mask", 1, r"--parse-layout is 'mask' with --attention-backend fa3.*Fix: .*alias"),
        ("alias", 16, r"--page-size 16: a question's context ends.*Fix: use --page-size 1"),
        ("auto", 16, r"--page-size 16: a question's context ends.*Fix: use --page-size 1"),
    ],
)
def test_what_cannot_be_run_is_refused(setting: str, page_size: int, message: str):
    with pytest.raises(BackendError, match=message):
        choose_layout(setting, "fa3", page_size)


@pytest.mark.parametrize(
    ("attention", "others", "message"),
    [
        (None, {}, "--attention-backend is None.*torch_native, flashinfer, triton, fa3"),
        ("aiter", {}, "--attention-backend is 'aiter'"),
        ("fa3", {"--x": "triton"}, "--x is 'triton' with --attention-backend fa3"),
    ],
)
def test_backends_that_are_refused(attention, others, message):
    with pytest.raises(BackendError, match=message):
        check_backends(attention, others)


def test_errors_name_the_setting_of_a_draft_model():
    flag = "--speculative-draft-attention-backend"
    with pytest.raises(BackendError, match=f"{flag} is 'fa4'"):
        check_backends("fa4", {}, flag)
    with pytest.raises(BackendError, match=f"with {flag} fa3 .*page-size 1, or another {flag}"):
        choose_layout("auto", "fa3", 16, flag)


def test_backends_that_are_not():
    check_backends("flashinfer", {"--x": None, "--y": "flashinfer"})
    check_device("cuda", "any", {})
    check_device("cpu", "torch_native", {"--x": None})
    for backend, others in (("fa4", {}), ("torch_native", {"--x": "fa4"})):
        with pytest.raises(BackendError, match="'fa4' with --device cpu. Fix: use torch_native"):
            check_device("cpu", backend, others)


def test_kv_that_a_pass_cannot_read():
    """Whatever the flag says: "auto" is what the checkpoint has."""
    with pytest.raises(BackendError, match=r"KV is torch.float8_e4m3fn.*fa3. Fix: use flashinfer"):
        check_kv("fa3", torch.float8_e4m3fn)
    check_kv("fa3", torch.bfloat16)
    check_kv("triton", torch.float8_e4m3fn)
