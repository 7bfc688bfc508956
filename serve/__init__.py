"""The OpenAI-compatible HTTP server. Imports no jax: an Engine comes in through its seam."""
