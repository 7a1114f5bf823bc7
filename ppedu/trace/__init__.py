"""Real runs: read their traces, and ask why a step takes as long as it does and what would be faster.

This package imports core and zoo alone, and so nothing but the standard library.
"""
