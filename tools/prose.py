"""Find constructions that the house style avoids: `python tools/prose.py [PATH ...]`, the whole project by default.

Reads docstrings, comments, strings and names in Python, the cells of notebooks without their outputs, and all other
text files. Prints `file:line: 'phrase': what to write instead`, and exits with 1 if it found any. CONTRIBUTING.md
describes the style.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A pattern, and what to write instead. A line break with its comment mark counts as one space; capitals do not matter.
BE = r"(?:is|are|was|were|be|been|being)"
NO = r"longer|more|less|fewer|better|worse|matter|different|one|other|such|slower|faster|need|reason|way"
STATEMENT = r"(?=[^?]*$|[^?]*?[.!])[^.!?]*"  # the rest of a sentence that is not a question
AVOID = {
    rf"{BE} told(?! apart)": "name who reports what to whom: raises, prints, reports",
    r"(?:say|says|said|told|saying) so": "name who reports what to whom: raises, prints, reports",
    r"comes? of (?:it|this|that|them)": "name the thing: the result, the cause",
    r"what is there": "name the thing",
    r"of what" + STATEMENT: "name the thing, or write two sentences",
    r"^(?-i:What) (?!to |I'd pick)" + STATEMENT: "name the thing: the result of ..., the actions that ...",
    r"(?:^|(?<=[.!:;] ))Who " + STATEMENT: "name the subject: a rank that ..., learners who ...",
    r"nobody|somebody|whoever": "name the subject: the rank, the caller, the peer, the user",
    r"those (?:who|whose)": "name them: ranks that ...",
    r"(?<!the )others (?:who|that|wait|have|need|send|share)|(?:by|of|to) others": "the other ranks, the peers",
    rf"(?<!there )(?<!where )\b{BE} no(?:$| (?!{NO})\w+)": "is not a ...",
    r"(?:is|are|was|were|has|have|had|having|gives?) none(?! of)": "there are no ..., has no ...",
    r"(?:is|are) there(?= (?:already|by now|yet|too)|[.,;:)]|$)": "exists, has arrived, is installed",
    r"for people": "human-readable",
    rf"{BE} taken (?:to be|for)": "is assumed to be",
    r"(?:the|a|one) way in(?= \w+s\b|[.,:;)]|$)": "Internal; call ...",
    r"so many(?! \w+ that)": "the number's name: n, microbatches",
    r"as (?:many|much|few) as (?:there (?:are|is)|it (?:has|takes|says))": "the number's name, one per ...",
    r"for ever": "forever",
    r"anew": "again, from the start",
    r"put(?:s|ting)? (?:\w+ )?off": "delay",
    r"under way": "in flight",
    r"c[oa]m(?:e|es|ing) by": "pass, visit",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:each|every|this|these|several|other|upper|ground) (?:rooms?|floors?)(?! for)|the rooms": "package, layer",
    r"(?:of|in) the house(?! style| that Jack)": "the project",
    r"(?:its|their|the|such) like": "name it: the same stage in every replica",
    r"in short": "leave it out, or: Vocabulary",
    r"drain(?:s|ed|ing)?": "cooldown",
    r"patien(?:ce|t|tly)": "timeout",
    r"for (?:it|him|her)self|for themselves": "alone, separately",
}
# Files that may use all of these, and phrases that one file may use.
ALLOWED = {
    ("CHANGELOG.md", "drain"),
    ("ppedu/launch/hosts/channel.py", "drain"),  # a method of asyncio
    *((name, "") for name in ("CONTRIBUTING.md", "tools/prose.py", "tests/test_prose.py")),
}
PATTERNS = [(re.compile(rf"(?<![\w-])(?:{each})(?![\w-])", re.IGNORECASE), instead) for each, instead in AVOID.items()]
BINARY = {".gif", ".png", ".gz", ".ico", ".pdf"}


def passages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, strings and names of Python source, each with the line on which it starts."""
    names: dict[str, int] = {}
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string != "None":
            names.setdefault(token.string.replace("_", " "), token.start[0])
        elif token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string
    yield from ((line, name) for name, line in names.items())
    for line in comments:
        if line - 1 not in comments:  # the first line of a block
            end = next(n for n in range(line, line + len(comments) + 1) if n not in comments)
            yield line, "\n".join(comments[n] for n in range(line, end))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def texts(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (cell of a notebook, first line, text) for everything in a file that is checked."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from (("", line, text) for line, text in passages(content))
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(content)["cells"]):
            yield f"cell {number}:", 1, "".join(cell["source"])
    else:
        yield "", 1, content


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line from 0, phrase, what to write instead) for every construction to avoid in a text."""
    lines = [re.sub(r"^[\s#/*>|]+", "", line).rstrip() for line in text.split("\n")]
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    for pattern, instead in PATTERNS:
        for match in pattern.finditer(" ".join(lines)):
            if not match[0].endswith("None"):
                yield bisect_right(starts, match.start()) - 1, match[0], instead


def main(paths: list[str]) -> int:
    """Print what is found in the files of the project under `paths`, or in all; return the exit status."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--full-name", *(paths or [str(ROOT)])]
    found = set()
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in BINARY and (name, "") not in ALLOWED:
            for cell, first, text in texts(path):
                found |= {
                    (name, cell, first + line, phrase, instead)
                    for line, phrase, instead in findings(text)
                    if (name, phrase.lower()) not in ALLOWED
                }
    for name, cell, line, phrase, instead in sorted(found):
        print(f"{name}:{cell}{line}: {phrase[:60]!r}: {instead}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
