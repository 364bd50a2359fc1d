"""The only package that uses private or undocumented torch; it tests for features, never for versions."""
