"""WikiText-2-v1 test split (Merity et al. 2016): the text file, or the hub's parquet of its lines."""

from __future__ import annotations

import re
from pathlib import Path

from harness.datasets.files import find, read_table
from harness.datasets.prompt import PromptText
from specter_core.errors import UserError

PATTERNS = ("test.txt", "wiki.test.tokens", "test-*.parquet")
HEADING = re.compile(r"(= )+.*( =)+")
TITLE = re.compile(r"= [^=](.*[^=])? =")


def files(root: Path) -> list[Path]:
    return find("wikitext2", root, PATTERNS, folders=("wikitext-2-v1",))[:1]


def load(root: Path) -> list[PromptText]:
    """One document per paragraph; it runs on to the end of its article, so that long prefixes exist too.

    The id is the paragraph's line number (from 0), the same for both formats.
    """
    texts: list[PromptText] = []
    article: list[tuple[int, str]] = []
    for number, line in [*enumerate(_lines(root)), (-1, "= End of file =")]:
        if TITLE.fullmatch(line):
            texts += _documents(article)
            article = []
        if line:
            article.append((number, line))
    return texts


def _lines(root: Path) -> list[str]:
    lines: list[str] = []
    for path in files(root):
        if path.suffix == ".parquet":
            lines += [str(t).strip() for t in read_table(path, ["text"])["text"]]
            continue
        try:
            lines += [t.strip() for t in path.read_text(encoding="utf-8").split("\n")]
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text; delete it and fetch it again") from None
    return lines


def _documents(article: list[tuple[int, str]]) -> list[PromptText]:
    return [
        PromptText(f"wikitext2-test-{number:05d}", "\n".join(t for _, t in article[i:]), "wikitext2", "WT")
        for i, (number, line) in enumerate(article)
        if not HEADING.fullmatch(line)
    ]
