"""Loaded by each Python process that a test starts: tests/conftest.py puts this folder on PYTHONPATH."""

import offline

offline.refuse_network()
