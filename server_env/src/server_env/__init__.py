"""The server half: a small gateway in front of vLLM or SGLang."""
