"""Makes tiny_model_greedy.npz: what transformers says with the embedded default model.

    python -m tests.golden.make_tiny_model_goldens --write-conversations FILE
    python tests/golden/make_tiny_model_goldens.py --conversations FILE

The first runs in this project's environment, the second where make_goldens.py runs. Both are due
when the model or its training tasks have changed.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parent
ROOT = GOLDEN.parents[1]
MODEL = ROOT / "qwen35_jax" / "assets" / "qwen3.5-tiny"
GREEDY = GOLDEN / "tiny_model_greedy.npz"
COUNT = 100
SEED = 11
MAX_NEW_TOKENS = 48
SHORT_PROMPT = 64
# A float32 logit differs between two engines by far less.
LEAST_GAP = 5e-3

Conversation = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tiny_model_greedy.npz.")
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--write-conversations", type=Path, metavar="FILE")
    step.add_argument("--conversations", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.write_conversations is not None:
        text = json.dumps(held_out_conversations())
        arguments.write_conversations.write_text(text, encoding="utf-8")
        return
    conversations = json.loads(arguments.conversations.read_text(encoding="utf-8"))
    np.savez_compressed(GREEDY, **goldens(conversations))
    print(f"{GREEDY.name}: {GREEDY.stat().st_size} bytes")


def model_sha256(directory: Path) -> str:
    """Of every file's name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def held_out_conversations() -> list[Conversation]:
    """COUNT of them, as evenly over the skills as it goes: what the chat template takes."""
    from bench.tiny_model.tasks import SKILLS, held_out_set

    per_skill = -(-COUNT // len(SKILLS))
    by_skill = held_out_set(per_skill, SEED)
    in_turns = [example for turn in range(per_skill) for example in by_skill[turn::per_skill]]
    return [
        {key: example[key] for key in ("messages", "tools", "enable_thinking")}
        for example in in_turns[:COUNT]
    ]


def goldens(conversations: list[Conversation]) -> dict[str, Any]:
    """The arrays of the file: short prompts first, of equal ones those with short answers.

    RuntimeError where a choice is so near a tie that another engine may choose otherwise.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from tests.golden.make_goldens import require_reference_path

    require_reference_path()
    # The model is too small to share.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = load_model()
    prompts = [render(tokenizer, conversation) for conversation in conversations]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    answered = [greedy(model, ids, vocabulary_size=len(tokenizer)) for ids in prompt_ids]
    answers, gaps = zip(*answered, strict=True)
    least = np.concatenate(gaps).min()
    print(
        f"{len(prompts)} prompts of {sum(map(len, prompt_ids))} tokens, answers of "
        f"{sum(map(len, answers))}; smallest gap {least:.4f}"
    )
    if least < LEAST_GAP:
        raise RuntimeError("not fit to be goldens: choose another SEED")

    # A batch of the test takes as long as its longest prompt and answer.
    order = sorted(
        range(len(prompts)),
        key=lambda place: (len(prompt_ids[place]) > SHORT_PROMPT, len(answers[place])),
    )
    stored = {
        "conversations": [conversations[place] for place in order],
        "prompts": [prompts[place] for place in order],
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    return {
        "prompt_ids": np.concatenate([prompt_ids[place] for place in order]).astype(np.uint16),
        "prompt_lengths": np.array([len(prompt_ids[place]) for place in order], np.uint16),
        "answer_ids": np.concatenate([answers[place] for place in order]).astype(np.uint16),
        "answer_gaps": np.concatenate([gaps[place] for place in order]),
        "answer_lengths": np.array([len(answers[place]) for place in order], np.uint16),
        "model_sha256": np.array(model_sha256(MODEL)),
        **{name: np.array(json.dumps(value)) for name, value in stored.items()},
    }


def load_model() -> Any:
    """In float32. RuntimeError where a tensor has no place or a place no tensor."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3_5ForCausalLM  # pyright: ignore[reportMissingImports]

    model, report = Qwen3_5ForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise RuntimeError(f"checkpoint and model disagree: {problems}")
    return model.eval()


def render(tokenizer: Any, conversation: Conversation) -> str:
    return tokenizer.apply_chat_template(
        conversation["messages"],
        tools=conversation["tools"] or None,
        enable_thinking=conversation["enable_thinking"],
        add_generation_prompt=True,
        tokenize=False,
    )


def greedy(model: Any, prompt: list[int], *, vocabulary_size: int) -> tuple[list[int], np.ndarray]:
    """The ids that transformers' own generate() adds, and the gap of the two best logits at each.

    The gaps are float32, and of the ids that the tokenizer has.
    """
    import torch  # pyright: ignore[reportMissingImports]

    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits)[:, :vocabulary_size].topk(2, dim=-1).values
    answer = output.sequences[0, len(prompt) :].tolist()
    return answer, (best[:, 0] - best[:, 1]).float().numpy()


if __name__ == "__main__":
    main()
