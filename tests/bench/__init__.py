"""Measurements: ``python -m tests.bench``. They print tables and assert nothing."""
