"""Prompts and answers as text: the checkpoint's tokenizer, and the conversion of each form of a
prompt to token ids."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from persistkv.errors import ConfigurationError, first_line

TokenIds = Sequence[int] | torch.Tensor | Mapping[str, Any]
Chat = Sequence[Mapping[str, Any]]
Prompt = str | Chat | TokenIds

_FORMS = 'text, a chat ([{"role": "user", "content": "…"}]), or token ids in one row'
_SPECIAL_TOKENS = 16
"""Largest vocabulary that counts as one of special tokens alone; no real one is so small."""
_REPLACEMENT = "\ufffd"  # tokenizers show this for bytes that are no whole character


def one_row(
    token_ids: TokenIds,
    name: str = "token_ids",
) -> list[int]:
    """Convert one prompt to a list of token ids.

    :param name: name of the argument, for errors.
    :raises ConfigurationError: there are several prompts, or token ids that are not integers.
    """
    rows: Any = token_ids
    if isinstance(rows, Mapping) and "input_ids" in rows:
        rows = rows["input_ids"]
    if hasattr(rows, "tolist"):  # true for a tensor and for an array of NumPy
        rows = rows.tolist()
    expected = "one prompt: integers in one row"
    if not isinstance(rows, Sequence):
        raise ConfigurationError(name, _shown(token_ids), expected)
    # take the only row of a batch
    if rows and _is_row(rows[0]):
        if len(rows) > 1:
            raise _batch(name, len(rows))
        rows = rows[0]
    ids = []
    for position, token in enumerate(rows):
        try:
            ids.append(operator.index(token))
        except TypeError:
            shown = f"{reprlib.repr(token)} at position {position}"
            raise ConfigurationError(name, shown, expected) from None
    return ids


def check_token_ids(
    name: str,
    token_ids: Sequence[int],
    vocabulary_size: int,
) -> None:
    """Raise ConfigurationError unless there are token ids, all of them in the vocabulary."""
    expected = f"at least one token, each from 0 to {vocabulary_size - 1}"
    if not token_ids:
        raise ConfigurationError(name, "no tokens", expected)
    # test all tokens at once; the loop finds the first invalid one, for the error
    if min(token_ids) >= 0 and max(token_ids) < vocabulary_size:
        return
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocabulary_size:
            shown = f"{token} at position {position}"
            raise ConfigurationError(name, shown, expected)


def _is_row(entry: object) -> bool:
    """Return whether an entry of a prompt is itself a row of tokens, as in a batch."""
    if isinstance(entry, torch.Tensor):
        return entry.ndim > 0
    return isinstance(entry, Sequence)


def _batch(name: str, size: int) -> ConfigurationError:
    """Return the error for ``size`` prompts instead of one in the argument ``name``."""
    return ConfigurationError(
        name,
        f"a batch of {size} prompts",
        "one prompt: batches are not supported, call the engine once for each prompt",
    )


def _shown(value: object) -> str | None:
    """Return the kind of a prompt, which may be too long to show; None for None."""
    return None if value is None else type(value).__name__


class Tokenizer:
    """A tokenizer of transformers, or the reason why there is none.

    :param missing: the reason, in words that follow "a tokenizer"; unused if there is one.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        missing: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._missing = missing

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint's directory or name; without one, or if it cannot be
        loaded, text is refused with the reason."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            # without files, transformers 4 makes a tokenizer that only has special tokens
            if len(tokenizer.get_vocab()) <= _SPECIAL_TOKENS:
                return cls(None, f"{source} has none: its vocabulary is empty")
            return cls(tokenizer)
        # after any error, the engine opens without a tokenizer, for prompts of token ids
        except Exception as error:
            return cls(
                None, f"{source} has none that can be loaded ({first_line(error)})"
            )

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt in any form. Text gets the special tokens of the
        tokenizer, a chat those of its template, with the beginning of an answer.

        :raises ConfigurationError: this is no prompt, a batch of prompts, or text without a
            tokenizer.
        """
        if isinstance(prompt, str):
            return self._text_ids(prompt)
        if isinstance(prompt, Sequence) and prompt:
            if isinstance(prompt[0], Mapping):
                return self._chat_ids(prompt)  # type: ignore[arg-type]
            if isinstance(prompt[0], str):
                raise _batch("prompt", len(prompt))
        is_token_ids = hasattr(prompt, "tolist") or isinstance(prompt, Sequence)
        is_tokenizer_output = isinstance(prompt, Mapping) and "input_ids" in prompt
        if not (is_token_ids or is_tokenizer_output):
            raise ConfigurationError("prompt", _shown(prompt), _FORMS)
        return one_row(prompt, "prompt")  # type: ignore[arg-type]

    def _text_ids(self, prompt: str) -> list[int]:
        """Return the token ids of a text."""
        tokenizer = self._required("text")
        try:
            ids: list[int] = tokenizer.encode(prompt)
        # tokenizers raise exceptions of any class
        except Exception as error:
            raise ConfigurationError(
                "prompt",
                "text",
                f"text that the tokenizer accepts ({first_line(error)})",
            ) from error
        return ids

    def _chat_ids(self, chat: Chat) -> list[int]:
        """Return the token ids of a chat, up to where the answer begins."""
        tokenizer = self._required("a chat")
        shown = f"a chat of {len(chat)} messages"
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                "prompt", shown, "text or token ids: the tokenizer has no chat template"
            )
        try:
            ids = tokenizer.apply_chat_template(
                list(chat), add_generation_prompt=True, tokenize=True
            )
        # a template is a program of the checkpoint, which may raise any exception
        except Exception as error:
            expected = f"messages that the chat template accepts ({first_line(error)})"
            raise ConfigurationError("prompt", shown, expected) from error
        return one_row(ids, "prompt")

    def _required(self, form: str) -> Any:
        """Return the tokenizer; raise ConfigurationError if there is none.

        :param form: kind of the prompt that needs one, for the error.
        """
        if self._tokenizer is None:
            raise ConfigurationError(
                "prompt", form, f"token ids, or a tokenizer: {self._missing}"
            )
        return self._tokenizer

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of tokens without special tokens; None if there is no tokenizer."""
        if self._tokenizer is None:
            return None
        decoded: str = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return decoded


class TextPieces:
    """Splits the text of a growing answer into pieces, one per token. Pieces end at whole
    characters; together they are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        """Ids of all tokens so far."""
        self._decoded_from = 0
        """Index of the token from which on ``add`` decodes: the first one of the last piece. A
        tokenizer may drop the space before the first token that it decodes, so a piece is decoded
        together with the one before it."""
        self._num_shown = 0
        """Number of tokens whose text was returned."""

    def add(self, token: int, *, last: bool) -> str:
        """Return the text that became complete with the next token: "" if a character is still
        incomplete, or there is no tokenizer.

        :param last: whether no token follows; then an incomplete character is returned as it is.
        """
        self._tokens.append(token)
        last_piece = self._tokens[self._decoded_from : self._num_shown]
        shown_text = self._tokenizer.text(last_piece) or ""
        # decode the last piece again, with the tokens after it
        decoded = self._tokens[self._decoded_from :]
        text = self._tokenizer.text(decoded) or ""
        # wait if the last character lacks bytes, which the next tokens bring
        if text.endswith(_REPLACEMENT) and not last:
            return ""
        self._decoded_from = self._num_shown
        self._num_shown = len(self._tokens)
        return text[len(shown_text) :]
