"""Container runtimes of this host, and having them ask the agent's mirror before an upstream.

`edits` says what a file says with the mirror and without it, `runtimes` which files a runtime
reads, `files` reads and writes below the root of a host, `record` remembers what was written and
what was there before, `installation` puts them together, and `check` sees whether a runtime asks.
"""
