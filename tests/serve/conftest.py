"""What the server's tests share."""

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("serve_tokenizer")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_directory(directory)
