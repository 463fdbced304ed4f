"""Calibration text: a file of plain text or JSON lines -> token blocks of one length."""

from __future__ import annotations

import gzip
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.errors import UserError

# Fields of a JSON line that may hold its text; "text" is C4's.
_FIELDS = ("text", "prefix", "content", "prompt")
_READ_LIMIT_CHARACTERS = 16_000_000
_PIECE_CHARACTERS = 100_000


class Tokenizer(NamedTuple):
    """encode: text -> ids, none special; start: ids that open a sequence; separator: ids between texts."""

    encode: Callable[[str], Sequence[int]]
    start: tuple[int, ...]
    separator: tuple[int, ...]


class Calibration(NamedTuple):
    """tokens int64 [samples, sequence_length] and what the draft's card says about their source."""

    tokens: Tensor
    file: str
    sha256: str


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer that lies beside the model; UserError when there is none."""
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{model_dir} has no tokenizer ({first}): put tokenizer.json beside the weights") from error
    end = () if hf.eos_token_id is None else (int(hf.eos_token_id),)

    def encode(text: str) -> Sequence[int]:
        return list(hf(text, add_special_tokens=False)["input_ids"])

    opening = tuple(int(token) for token in hf("")["input_ids"] if (int(token),) != end)
    return Tokenizer(encode, opening, end)


def load_calibration(path: Path, tokenizer: Tokenizer, samples: int, sequence_length: int) -> Calibration:
    """Cuts up to 16 million characters of the file into blocks and takes `samples` of them at even distances.

    path: .txt (one text), .jsonl or .json (one object per line), either also with .gz. UserError when the
    file holds too few tokens for samples x sequence_length.
    """
    body = sequence_length - len(tokenizer.start)
    if samples < 1 or body < 1:
        raise UserError(f"{samples} samples of {sequence_length} tokens calibrate nothing: use 128 samples of 512")
    stream = array("i")
    for piece, ends in _pieces(path):
        stream.extend(tokenizer.encode(piece))
        if ends:
            stream.extend(tokenizer.separator)
    blocks = len(stream) // body
    if blocks < samples:
        raise UserError(
            f"{path} gives {blocks} blocks of {sequence_length} tokens, {samples} samples are asked for: "
            "use a longer file or fewer --samples"
        )
    starts = [index * blocks // samples * body for index in range(samples)]
    tokens = torch.tensor([[*tokenizer.start, *stream[start : start + body]] for start in starts])
    with path.open("rb") as file:
        return Calibration(tokens, path.name, hashlib.file_digest(file, "sha256").hexdigest())


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """(piece of text, whether the text ends with it); pieces are whole lines and not long."""
    if not path.is_file():
        raise UserError(f"calibration file {path} does not exist: give a .txt, .jsonl or .json.gz file")
    name = path.name.removesuffix(".gz")
    left = _READ_LIMIT_CHARACTERS
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            piece = ""
            for number, line in enumerate(file, start=1):
                if name.endswith((".jsonl", ".json")):
                    text = _text_of(line, path, number)[:left]
                    yield text, True
                else:
                    text = line[:left]
                    piece += text
                    if len(piece) >= _PIECE_CHARACTERS:
                        yield piece, False
                        piece = ""
                left -= len(text)
                if left <= 0:
                    break
            if piece:
                yield piece, True
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"calibration file {path} cannot be read ({error}): fetch it again") from error


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {number} is no JSON ({error}): one object per line is needed") from error
    if isinstance(row, dict):
        for field in _FIELDS:
            if isinstance(row.get(field), str):
                return str(row[field])
    raise UserError(f"{path} line {number} has none of the fields {', '.join(_FIELDS)}: rename its text field")
