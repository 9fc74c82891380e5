"""Adapters on their way to the server."""
