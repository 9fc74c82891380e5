"""What tests with the fake engine share: the model, and which engine's words the fake one speaks."""

import pytest

import served


@pytest.fixture
def model(tmp_path):
    """A model folder, as far as the server half and the fake engine look at it."""
    return served.tiny_model(tmp_path / "model")


@pytest.fixture(params=["vllm", "sglang"])
def backend(request, monkeypatch):
    """For tests, or with `usefixtures` for whole files, that hold for either engine."""
    monkeypatch.setattr(served, "BACKEND", request.param)
    return request.param
