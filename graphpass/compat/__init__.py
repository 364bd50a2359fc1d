"""The only package that names private or undocumented torch. Everything is found by capability, never by version."""
