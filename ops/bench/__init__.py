"""Benchmarks; speed lives here and never in tests."""
