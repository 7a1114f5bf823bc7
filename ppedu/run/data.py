"""Text to train on, without a download: the documentation topics that come with every Python."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

import torch

from ppedu.core.errors import PipelineError, SettingError


class Text:
    """A text as a sequence of characters, each a token.

    path: a UTF-8 text file; by default Python's own documentation topics, some 400,000 characters or more.

    Raises:
        PipelineError: the file cannot be read.
        SettingError: the file is empty.
    """

    def __init__(self, path: str | Path | None = None):
        if path is None:
            text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        else:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PipelineError(f"cannot read the text {str(path)!r}: {error}") from error
            if not text:
                raise SettingError(f"the text {str(path)!r} is empty")
        self.characters = sorted(set(text))
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
