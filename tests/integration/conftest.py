"""Which engine's words the fake one speaks."""

import pytest

import served


@pytest.fixture(params=["vllm", "sglang"])
def backend(request, monkeypatch):
    """For tests, or with `usefixtures` for whole files, that hold for either engine."""
    monkeypatch.setattr(served, "BACKEND", request.param)
    return request.param
