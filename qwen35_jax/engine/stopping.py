"""What a request may ask of this model, and when it ends. No jax here."""

from qwen35_jax.engine.plan import Sequence
from qwen35_jax.engine.request import FinishReason
from qwen35_jax.errors import InvalidRequestError


def ending_of(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """(finish reason, stop id) after `token_id`, the last that was generated."""
    if token_id in sequence.stop_ids:
        return "stop", token_id
    if len(sequence.generated) >= sequence.limit:
        return "length", None
    return None, None


def check_prompt(prompt: tuple[int, ...], vocabulary_size: int, max_model_len: int) -> None:
    """Raise InvalidRequestError for a prompt that can never run."""
    if not prompt:
        raise InvalidRequestError("prompt is empty: want at least one token", param="prompt")
    if len(prompt) >= max_model_len:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; with at least one to generate, the model's context "
            f"holds {max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    for token_id in prompt:
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequestError(
                f"prompt holds token id {token_id}; the vocabulary has {vocabulary_size} ids",
                param="prompt",
            )
