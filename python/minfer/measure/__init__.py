"""Timing, workloads and the shapes of published models, for the tuner, the demo and the suites under ``bench/``."""
