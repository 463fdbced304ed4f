"""Text for models whose tokens mean nothing: bytes, spread over the vocabulary.

A synthetic checkpoint has no tokenizer of its own. This one lets prompts be given as text, the same in memory and from
a written folder; the real model's tokenizer.json in that folder serves as well.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specter_core.errors import UserError

BYTES = 256


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """The bytes of UTF-8 are the first 256 multiples of V // 256, which leave out the last ids, where models have their
    end of text; every other id i decodes to "<i>". UserError: fewer than 256 tokens."""
    if vocab_size < BYTES:
        raise UserError(f"a vocabulary of {vocab_size} tokens has no room for {BYTES} bytes; use a larger one")
    step = vocab_size // BYTES
    letters = {byte * step: letter for byte, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {letters.get(i, f"<{i}>"): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
