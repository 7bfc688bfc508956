"""The reference side of `qwen35 verify`, a process of its own: transformers' logits to a file.

Run by verify.py as a script, so that torch shares neither the process nor the device's memory with
jax. It imports nothing of this project: its interpreter may be another one.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

TOP = 64


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, help=".npz of int64 prompts by name")
    parser.add_argument("output", type=Path, help=".npz to write")
    parser.add_argument("--dtype", required=True, choices=("bfloat16", "float32"))
    parser.add_argument("--device", required=True, choices=("auto", "cpu", "cuda"))
    parser.add_argument("--positions", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()

    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.utils.logging.disable_progress_bar()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    )
    model.to(device).eval()
    results: dict[str, np.ndarray] = {
        "versions": np.array(
            [f"transformers {transformers.__version__}", f"torch {torch.__version__}", device]
        )
    }

    def keep(name: str, logits: torch.Tensor) -> None:
        logprobs, ids = torch.log_softmax(logits.float(), dim=-1).topk(TOP, dim=-1)
        results[f"{name}.logprobs"] = logprobs.cpu().numpy()
        results[f"{name}.ids"] = ids.cpu().numpy().astype(np.int32)

    with torch.inference_mode():
        for name, prompt in np.load(arguments.prompts).items():
            print(f"reference: {name}", file=sys.stderr, flush=True)
            ids = torch.tensor(prompt[None], device=device)
            positions = min(arguments.positions, len(prompt))
            out = model(ids, use_cache=True, logits_to_keep=positions)
            keep(f"{name}.prompt", out.logits[0])
            steps = []
            token = out.logits[:, -1:].argmax(-1)
            greedy = [int(token)]
            for _ in range(arguments.steps):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                steps.append(out.logits[0])
                token = out.logits[:, -1:].argmax(-1)
                greedy.append(int(token))
            keep(f"{name}.greedy", torch.cat(steps))
            results[f"{name}.tokens"] = np.array(greedy[:-1], np.int32)
    np.savez(arguments.output, **results)  # pyright: ignore[reportArgumentType]
    return 0


if __name__ == "__main__":
    sys.exit(main())
