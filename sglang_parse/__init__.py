"""PARSE for SGLang: semantic speculative generation inside a stock SGLang server."""

from sglang_parse.core.config import ParseConfig, configure

__all__ = ["ParseConfig", "configure"]
