"""`qwen35 generate`: complete prompts in the terminal, printing the text as it comes."""

import argparse
import io
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_dry_run_argument,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
    log_to_terminal,
    print_memory_plan,
)
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qwen35_jax.llm import LLM


# Thoughts come before an answer to a chat.
MAX_TOKENS, MAX_CHAT_TOKENS = 128, 1024


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen35 generate",
        description="Complete prompts. The text goes to stdout as it comes, the rest to stderr.",
        allow_abbrev=False,
    )
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to complete; repeat for more prompts (default: read stdin)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the chat template as a user turn"
    )
    parser.add_argument(
        "--disable-thinking", action="store_true", help="with --chat, answer without thoughts"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"tokens to generate at most (default: {MAX_TOKENS}, with --chat {MAX_CHAT_TOKENS})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="keep the likeliest tokens up to this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="keep this many of the likeliest tokens; 0 keeps all (default: %(default)s)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="keep tokens this likely relative to the best (default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's own end tokens"
    )
    add_dry_run_argument(parser)
    add_seed_argument(parser, help="seed of sampling and dummy weights (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.disable_thinking and not arguments.chat:
        parser.error("--disable-thinking needs --chat")
    max_tokens = arguments.max_tokens
    if max_tokens is None:
        max_tokens = MAX_CHAT_TOKENS if arguments.chat else MAX_TOKENS
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        max_tokens=max_tokens,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.seed,
    )
    config = engine_config(parser, arguments, seed=arguments.seed)
    if arguments.dry_run:
        log_to_terminal()
        print_memory_plan(config)
        return 0
    prompts = arguments.prompt or [_read_stdin()]
    if not all(prompts):
        source = "--prompt" if arguments.prompt else "stdin"
        raise InvalidRequestError(f"{source} is empty: want at least one token to go on from")
    log_to_terminal()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character

    from qwen35_jax.llm import LLM, GenerationError

    with LLM.from_config(config) as llm:
        print(f"{llm.loaded.model_name}: {llm.loaded.description}", file=sys.stderr)
        for number, prompt in enumerate(prompts, start=1):
            if len(prompts) > 1:
                print(f"--- prompt {number} of {len(prompts)}", file=sys.stderr)
            if arguments.chat:
                # None leaves it to the template, as LLM.chat does.
                prompt = _as_chat(
                    llm, prompt, thinking=False if arguments.disable_thinking else None
                )
            try:
                _complete(llm, prompt, params)
            except GenerationError as error:
                print(f"qwen35 generate: error: {error}", file=sys.stderr)
                return 1
    return 0


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("stdin is closed: give --prompt")
    if sys.stdin.isatty():
        print("Type the prompt, then end with Ctrl-D:", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the prompt on stdin is not {error.encoding} text") from None


def _as_chat(llm: "LLM", prompt: str, *, thinking: bool | None) -> str:
    from qwen35_jax.chat_template import ChatTemplate

    template = ChatTemplate.from_directory(llm.loaded.directory)
    if template is None:
        raise InvalidRequestError(f"{llm.loaded.directory} has no chat template; drop --chat")
    return template.render([{"role": "user", "content": prompt}], enable_thinking=thinking)


def _complete(llm: "LLM", prompt: str, params: SamplingParams) -> None:
    started = time.perf_counter()
    times: list[float] = []
    tokens = 0
    finish = None
    for delta in llm.stream(prompt, params):
        times.append(time.perf_counter())
        tokens += len(delta.token_ids)
        finish = delta.finish_reason or finish
        print(delta.text, end="", flush=True)
    print(flush=True)
    rate = ""
    if len(times) > 1:
        rate = f"; then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    if finish == "length":
        finish = f"cut off at --max-tokens {tokens}" if tokens == params.max_tokens else finish
    print(
        f"[{tokens} tokens, {finish}; first after {times[0] - started:.2f} s{rate}]",
        file=sys.stderr,
    )
