"""Benchmarks: an asv suite (`asv.conf.json`, `benchmarks/`), the report, and the experiments behind the design."""
