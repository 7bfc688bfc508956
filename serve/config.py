"""What the HTTP server can be told. Checked once, when it is made."""

from dataclasses import dataclass

from qwen35_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the HTTP server.

    served_model_name: the only `model` that requests may name.
    host, port: where to listen; port 0 takes a free one.
    max_body_bytes: larger request bodies are refused with 413.
    keep_alive_seconds: a stream that has nothing to say for so long gets an SSE comment.
    drain_seconds: how long streams may go on after a signal to stop.

    Raises ConfigError, naming field and value.
    """

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 32 * 1024 * 1024
    keep_alive_seconds: float = 5.0
    drain_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_served_model_name(self.served_model_name)
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 listens on every interface")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}")
        if not self.keep_alive_seconds > 0:
            raise ConfigError(f"keep_alive_seconds must be over 0, not {self.keep_alive_seconds}")
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds must be at least 0, not {self.drain_seconds}")


def check_served_model_name(name: str) -> None:
    """Raises ConfigError for a name that no request could give: empty or not Unicode text."""
    if not name:
        raise ConfigError("served_model_name must not be empty")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"served_model_name {name!r} is not UTF-8; choose another") from None
