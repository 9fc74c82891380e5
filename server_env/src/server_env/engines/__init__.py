"""Engines: what one must do, and how vLLM and SGLang do it."""
