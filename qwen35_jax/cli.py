"""`qwen35 serve | generate | verify`. Each command's module is imported when it is called."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from qwen35_jax.errors import USER_ERRORS

# Command -> the module whose `main(argv)` runs it and returns the exit code, and its one line.
COMMANDS = {
    "serve": ("serve.__main__", "serve a model over an OpenAI-compatible HTTP API"),
    "generate": ("qwen35_jax.generate", "complete prompts in the terminal"),
    "verify": ("qwen35_jax.verify", "compare a checkpoint's logits with transformers'"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 2 for what the user can mend, in one line."""
    # None where the shell closed them; libraries expect to write to them all the same.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    parser = argparse.ArgumentParser(
        prog="qwen35",
        description="Qwen3.5 inference in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items())
        + "\n\n`qwen35 COMMAND --help` lists a command's options.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", choices=COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.version:
        from qwen35_jax import __version__

        print(f"qwen35-jax {__version__}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        command: Callable[[Sequence[str]], int]
        command = import_module(COMMANDS[arguments.command][0]).main
        return command(arguments.rest)
    except USER_ERRORS as error:
        print(f"qwen35 {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left; leave nothing for the interpreter to flush to it.
        sys.stdout = None
        return 1
    except OSError as error:
        print(f"qwen35 {arguments.command}: error: {error}", file=sys.stderr)
        sys.stdout = None  # its buffer may hold what could not be written
        return 1


if __name__ == "__main__":
    sys.exit(main())
