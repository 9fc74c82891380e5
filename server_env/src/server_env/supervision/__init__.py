"""Engines kept running: one life, all lives of one, several that are alike."""
