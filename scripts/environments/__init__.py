"""Tandem's environments: their lock, how they are built, and how they are checked.

Standard library only: this package runs before any environment exists.
"""
