"""Proof by killing: small runs are killed at every named step, resumed, killed while they resume, and judged."""
