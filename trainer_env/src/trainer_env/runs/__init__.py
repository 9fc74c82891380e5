"""A run's folder: what is written there, and read again."""
