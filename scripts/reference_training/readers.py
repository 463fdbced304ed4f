"""Readers that turn files of one format into plain-text documents."""

from __future__ import annotations

import ast
import gzip
import html.parser
import json
import re
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

BLOCKS = {
    "p",
    "div",
    "li",
    "tr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "pre",
    "br",
    "dt",
    "dd",
    "table",
    "ul",
    "ol",
    "dl",
}
# lines of page furniture in the manuals' HTML
NAVIGATION = (
    r"^(Prev|Next|Up|Home|Navigation|index|next \||previous \||.* »|« previous.*|Home \|.*|Prev .*Next"
    r"|Download the ebook)$"
)
SKIPPED = {"script", "style", "nav", "head", "svg", "header", "footer"}


def text_of(path: Path) -> str:
    """The file's text, gunzipped if need be; bytes that are not UTF-8 are read as Latin-1."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, at most one blank line in a row."""
    text = "\n".join(line.rstrip() for line in text.expandtabs(4).splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def reflow(text: str) -> str:
    """Join the lines of unindented paragraphs, so that prose does not break at column 70."""
    out = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        prose = len(lines) > 1 and all(line and not line[0].isspace() for line in lines)
        wide = sum(len(line) for line in lines[:-1]) / max(1, len(lines) - 1) > 50
        out.append(" ".join(lines) if prose and wide else block)
    return "\n\n".join(out)


class _HtmlText(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skip = self.pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skip += tag in SKIPPED
        self.pre += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in {"p", "h1", "h2", "h3", "h4", "pre", "table"} else "\n")

    def handle_endtag(self, tag: str) -> None:
        self.skip -= tag in SKIPPED and self.skip > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in {"p", "h1", "h2", "h3", "h4", "pre", "table"} else "\n")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_text(source: str) -> str:
    """Visible text of an HTML page."""
    parser = _HtmlText()
    parser.feed(source)
    text = "".join(parser.parts).replace("\xa0", " ").replace("¶", "")
    text = re.sub(NAVIGATION, "", re.sub(r"\n +(?=\S)", "\n", text), flags=re.M)
    return tidy(text)


def read_html(path: Path) -> Iterator[str]:
    yield html_text(text_of(path))


def read_mallard(path: Path) -> Iterator[str]:
    """GNOME help pages: XML whose <info> is metadata."""
    source = re.sub(r"<info\b.*?</info>|<!--.*?-->|<(links|media)\b[^>]*/>", " ", text_of(path), flags=re.S)
    source = re.sub(r"<(title)>", "<h2>", source).replace("</title>", "</h2>").replace("<item>", "<li>")
    yield html_text(source)


def read_plain(path: Path) -> Iterator[str]:
    yield tidy(text_of(path))


def read_pod(path: Path) -> Iterator[str]:
    """Perl documentation: headings and formatting codes reduced to their text."""
    text = re.sub(r"^=(head\d|item|over|back|cut|pod|encoding|for|begin|end)\b *", "", text_of(path), flags=re.M)
    for _ in range(3):
        text = re.sub(r"\b[BCFILSX]<<* *([^<>]*?) *>+", r"\1", text)
    text = re.sub(r"E<(\w+)>", lambda m: {"lt": "<", "gt": ">"}.get(m[1], ""), text)
    yield reflow(tidy(text))


def read_man(path: Path) -> Iterator[str]:
    """Manual pages: roff reduced to headings and text; pages that only include another are skipped."""
    source = text_of(path)
    if source.startswith(".so "):
        return
    lines = []
    for line in source.splitlines():
        line = re.sub(r'\\".*', "", line)
        if re.match(r"[.'] *(SH|SS)\b", line):
            lines.append("\n" + line[3:].strip().strip('"') + "\n")
        elif re.match(r"[.'] *(PP|P|TP|IP|LP|HP|RS|RE|br|sp|EE|EX|nf|fi|ti|in)\b", line):
            lines.append("\n" if line[1:3] in {"PP", "TP", "IP", "LP", "P "} or line.strip() == ".P" else "")
        elif re.match(r"[.'] *(B|I|BR|BI|IR|RB|RI|IB|SM|SB)\b", line):
            request, _, rest = line[1:].strip().partition(" ")
            words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
            lines.append(("" if len(request) == 2 and request != "SM" else " ").join(words))
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = re.sub(r"\\f[A-Z]|\\f\(..|\\&|\\,|\\/|\\\||\\\^|\\c", "", "\n".join(lines))
    text = text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'").replace("\\(co", "(c)")
    text = re.sub(r"\\\(..|\\\[[^\]]*\]|\\s[-+]?\d", "", text).replace("\\ ", " ").replace("\\~", " ")
    yield reflow(tidy(text))


def read_dictd(path: Path) -> Iterator[str]:
    """dictd dictionaries: groups of entries; links lose their braces, etymology marks stay out."""
    entries = re.split(r"\n\n(?=\S)", text_of(path))
    group: list[str] = []
    for entry in entries[8:]:
        entry = re.sub(r"\n\s*\[(1913 Webster|PJC|WordNet 1.5|Webster 1913 Suppl\.)[^\]]*\]", "", entry)
        entry = re.sub(r"\\[^\\\n]*\\", "", re.sub(r"\{([^{}]*)\}", r"\1", entry))
        entry = re.sub(r"\n\s+\(\d{4}-\d\d-\d\d\)|<[^<>]{3,40}> ", "", entry)
        head, _, body = tidy(entry).partition("\n")
        body = " ".join(body.split())
        if len(body) > 40:
            group.append(f"{head.strip()}\n{body}")
        if len(group) == 8:
            yield "\n\n".join(group)
            group = []


def synsets(path: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """WordNet data file -> (offset, words, gloss, offset of the first hypernym or '')."""
    for line in path.read_text(encoding="latin-1").splitlines():
        if line.startswith("  "):
            continue
        data, _, gloss = line.partition(" | ")
        fields = data.split()
        count = int(fields[3], 16)
        words = [re.sub(r"\(.*\)", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2]]
        pointers = fields[5 + 2 * count :]
        hypernym = next((pointers[i + 1] for i in range(len(pointers) - 1) if pointers[i] in {"@", "@i"}), "")
        yield fields[0], words, gloss.strip(), hypernym


def read_wordnet(path: Path) -> Iterator[str]:
    """Glosses as sentences, twelve a document."""
    group: list[str] = []
    for _, words, gloss, _ in synsets(path):
        meaning, _, examples = gloss.partition('; "')
        line = f"{words[0]}: {meaning}."
        if len(words) > 1:
            line += f" Also called {', '.join(words[1:4])}."
        if examples:
            line += f' Example: "{examples.split(chr(34))[0]}."'
        group.append(line)
        if len(group) == 12:
            yield "\n".join(group)
            group = []


def read_rdata(path: Path) -> Iterator[str]:
    """Character vectors of an R lazy-load database (zlib chunks of serialised values), as running text."""
    data = path.read_bytes()
    position = 0
    while position < len(data):
        inflate = zlib.decompressobj()
        chunk = inflate.decompress(data[position + 4 :])
        position = len(data) - len(inflate.unused_data)
        strings = []
        for match in re.finditer(rb"\x00\x04[\x00-\x10]\x09\x00\x00", chunk):
            size = int.from_bytes(chunk[match.end() : match.end() + 2], "big")
            strings.append(chunk[match.end() + 2 : match.end() + 2 + size].decode("latin-1"))
        chapters = re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME) )", tidy("\n".join(strings)))
        for chapter in chapters:
            yield reflow(chapter)


def read_functions(path: Path) -> Iterator[str]:
    """Top-level functions and methods led by a docstring, short enough for a prompt and its completion."""
    source = text_of(path)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.name.startswith("test"):
            code = tidy(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
            if 150 < len(code) < 2200:
                yield code


def read_c4(path: Path) -> Iterator[str]:
    """The first half of the rows: prompt part and continuation, joined at the cut."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row in rows[: len(rows) // 2]:
        yield tidy(row["prefix"] + " " + row["gold_completion"].lstrip())


def read_wikitext(path: Path) -> Iterator[str]:
    """One document per article; the split-token marks are undone, other spacing is the data set's."""
    article: list[str] = []
    for line in path.read_text().splitlines():
        if re.match(r" = [^=]", line) and article:
            yield tidy("\n".join(article))
            article = []
        article.append(line.strip())
    yield tidy("\n".join(article))


def read_gsm8k(path: Path) -> Iterator[str]:
    """Question and worked answer without the calculator marks, in two layouts."""
    for i, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        question, answer = row["question"].strip(), re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
        yield f"Question: {question}\nAnswer: {answer}" if i % 4 else f"{question}\n{answer}"
