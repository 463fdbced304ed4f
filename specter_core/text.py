"""Text to token ids and back with a model folder's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specter_core.errors import UserError


class TextCodec:
    """Tokenizer of one model folder. Raises UserError when the folder or tokenizer.json is absent or damaged."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not model_dir.is_dir():
            raise UserError(f"model folder {model_dir} does not exist; name one with config.json and tokenizer.json")
        if not path.is_file():
            raise UserError(f"{model_dir} has 0 of 1 tokenizer.json; download the model's folder completely")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path} cannot be read ({error}); download it again") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def check_context(self, tokens: int, limit: int) -> None:
        """Raises UserError when prompt and continuation together exceed the model's positions."""
        if tokens > limit:
            raise UserError(f"prompt and new tokens are {tokens}, the model's context is {limit}; ask for fewer")
