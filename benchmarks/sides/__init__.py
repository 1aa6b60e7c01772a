"""The two sides of benchmarks/run.py, each a process of its own that answers requests: one line of JSON each way."""
