"""Text to train on without a download: Python's documentation topics, and a nursery rhyme that is learned sooner."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data import topics

import torch

from ppedu.core import PipelineError, SettingError

# The alphabet of the default text. The topics of different Python versions contain different characters. With a fixed
# alphabet, a model has the same size on all versions, and its tokens have the same meaning.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
ALPHABET = ["\n", *map(chr, range(ord(" "), ord("~") + 1)), UNKNOWN]

# "This Is the House That Jack Built": a file of 2,000 characters. A small model repeats it after a hundred steps.
RHYME = str(Path(__file__).with_name("rhyme.txt"))


class Text:
    """A text as a sequence of tokens, one per character.

    Args:
        path: A UTF-8 text file, whose alphabet is the set of its characters. The default is Python's documentation
            topics, at least 400,000 characters of printable ASCII and newlines, with one replacement character for all
            others.

    Attributes:
        characters: The alphabet: token n is `characters[n]`.
        tokens: The text as numbers, int64 of shape (number of characters in the text,).

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
                raise PipelineError(f"cannot read the text {str(path)!r}: {error}; name a UTF-8 text file") from error
            if not text:
                raise SettingError(f"the text {str(path)!r} is empty; name a file with text in it")
        self.characters = list(ALPHABET) if path is None else sorted(set(text))
        number = {character: token for token, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])

    def batch(self, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 of shape (size, length): random excerpts, and these shifted by one token.

        The same seed gives the same batch on every rank.

        Raises:
            SettingError: the text has fewer than `length + 1` characters.
        """
        starts = len(self.tokens) - length
        if starts < 1:
            raise SettingError(
                f"excerpts of {length} characters need a text of at least {length + 1}; this one has "
                f"{len(self.tokens)}: take a longer text or a smaller context"
            )
        first = torch.randint(starts, (size, 1), generator=torch.Generator().manual_seed(seed))
        positions = first + torch.arange(length)
        return self.tokens[positions], self.tokens[positions + 1]
