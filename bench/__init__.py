"""Benchmarks: `python -m bench` runs them all, README.md says what each measures. Every file with
an `if __name__` also runs alone."""
