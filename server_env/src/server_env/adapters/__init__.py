"""Adapters in the server: their files, their versions, and the one that proves that engines apply them."""
