"""A small, real asynchronous RL run on by-handle payloads: `python -m examples.async_rl`."""
