"""`python -m tests.serve.server_program FACTORY [FLAGS]`: serve with that engine, and no jax."""

import sys

from serve.__main__ import main


def run(factory: str, flags: list[str]) -> int | str:
    exit_code = main(flags, factory=factory)
    loaded = {"jax", "jaxlib", "flax", "torch"} & sys.modules.keys()
    return f"the server's process loaded {sorted(loaded)}" if loaded else exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
