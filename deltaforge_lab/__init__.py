"""The lab: real servers, synthetic logs, the demo and the benchmarks.

The product never imports it.
"""
