"""The byte-level BPE tokenizer that the reference models share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Source

END_OF_TEXT = "<|endoftext|>"
# words with their leading space, single digits, punctuation, line ends, blanks: as Qwen's tokenizer splits
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(sources: list[Source], vocab_size: int, megabytes: float, seed: int) -> Tokenizer:
    """BPE over a sample of every source in proportion to its weight; id 0 is the end of a text."""
    rng = random.Random(seed)
    total_weight = sum(s.weight for s in sources)

    def sample() -> Iterator[str]:
        for source in sources:
            quota = megabytes * 1e6 * source.weight / total_weight
            for text in rng.sample(source.documents, len(source.documents)):
                yield text[:20_000]
                quota -= min(len(text), 20_000)
                if quota <= 0:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """tokenizer.json (compact) and tokenizer_config.json."""
    content = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each id stands for (0 for the end of a text)."""
    alphabet_is_one_char_per_byte = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    return [0 if token == END_OF_TEXT else len(token) for token in alphabet_is_one_char_per_byte]
