"""The task: spell a word backwards, one character per token.

A prompt is ``^abc>`` and its target ``cba$``. The words are those of Python's own help texts
(`pydoc_data.topics`), so nothing is downloaded and nothing is invented.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache

PAD, BOS, SEP, EOS = 0, 1, 2, 3
_SYMBOLS = ("_", "^", ">", "$", *"abcdefghijklmnopqrstuvwxyz")
_IDS = {symbol: i for i, symbol in enumerate(_SYMBOLS)}
VOCAB_SIZE = len(_SYMBOLS)

MIN_LETTERS, MAX_LETTERS = 3, 7
MAX_NEW = MAX_LETTERS + 1
"""Most tokens of a completion: the letters and the end mark."""
MAX_TOKENS = 1 + MAX_LETTERS + 1 + MAX_NEW
"""Most tokens of a sequence."""


def encode(text: str) -> list[int]:
    """Token ids of a text of lowercase letters and the marks ``^ > $``."""
    return [_IDS[symbol] for symbol in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids; padding shows as ``_``."""
    return "".join(_SYMBOLS[int(token)] for token in tokens)


def prompt_of(word: str) -> list[int]:
    """Token ids of a word's prompt."""
    return encode(f"^{word}>")


def target_of(word: str) -> list[int]:
    """Token ids of the completion that earns a reward of one."""
    return encode(f"{word[::-1]}$")


@cache
def words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(train, held out): unique words of 3 to 7 letters, one in eight held out, always the same split."""
    from pydoc_data.topics import topics

    pattern = rf"\b[a-z]{{{MIN_LETTERS},{MAX_LETTERS}}}\b"
    unique = sorted({word for text in topics.values() for word in re.findall(pattern, text)})
    random.Random("async_rl words").shuffle(unique)
    cut = len(unique) // 8
    return tuple(unique[cut:]), tuple(unique[:cut])


def demonstration(word: str, rng: random.Random, whole_share: float) -> list[int]:
    """A completion for the warm start: whole with this probability, else given up after two letters.

    Spelling backwards is learned from these; going on to the end is left to the reward.
    """
    return target_of(word) if rng.random() < whole_share else encode(f"{word[:-3:-1]}$")


def reward(word: str, completion: Sequence[int]) -> float:
    """In [0, 1]: half for the share of characters in their place, half for an exact match.

    Characters are compared place by place against the target with its end mark; a completion that is too
    long counts its length.
    """
    target = target_of(word)
    got = [int(token) for token in completion]
    hits = sum(a == b for a, b in zip(got, target, strict=False))
    return 0.5 * hits / max(len(got), len(target)) + 0.5 * (got == target)
