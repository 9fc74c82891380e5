"""Completions from the server: asked for, and kept ahead of training."""
