"""The lab: real servers, the demo and the benchmarks. The product never imports it."""
