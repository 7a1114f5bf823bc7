"""Text to train on, without a download: the documentation topics that come with every Python."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data import topics

import torch

from ppedu.core.errors import PipelineError, SettingError

# The default text's alphabet. The topics differ between versions of Python, even in the characters that occur in them;
# with this alphabet a model has the same size on all versions, and its tokens mean the same.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
ALPHABET = ["\n", *map(chr, range(ord(" "), ord("~") + 1)), UNKNOWN]


class Text:
    """A text as a sequence of characters, each a token; `characters` lists the alphabet.

    path: a UTF-8 text file, whose alphabet is the characters in it. The default is Python's own documentation topics,
        at least 400,000 characters: printable ASCII and newlines, and one replacement character for everything else.

    Raises:
        PipelineError: the file cannot be read.
        SettingError: the file is empty.
    """

    def __init__(self, path: str | Path | None = None):
        if path is None:
            text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
            text = re.sub(r"[^\n -~]", UNKNOWN, text)
        else:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PipelineError(f"cannot read the text {str(path)!r}: {error}") from error
            if not text:
                raise SettingError(f"the text {str(path)!r} is empty")
        self.characters = list(ALPHABET) if path is None else sorted(set(text))
        number = {character: token for token, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])

    def batch(self, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` random excerpts of `length` tokens, and the token that follows each: two (size, length) tensors.

        The same seed gives the same batch on every rank.

        Raises:
            SettingError: the text is too short for an excerpt.
        """
        room = len(self.tokens) - length
        if room < 1:
            raise SettingError(
                f"the text has {len(self.tokens)} characters; excerpts of {length} need at least {length + 1}"
            )
        starts = torch.randint(room, (size, 1), generator=torch.Generator().manual_seed(seed))
        places = starts + torch.arange(length)
        return self.tokens[places], self.tokens[places + 1]
