"""The ``cedar`` command, live view, cache tooling and benchmarks."""
