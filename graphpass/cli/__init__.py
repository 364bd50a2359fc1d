"""The command line: ``python -m graphpass`` and ``graphpass``, with ``explain``, ``doctor``, ``bench`` and ``plan``."""
