"""The choice of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from persistkv.errors import ConfigurationError


@dataclass(frozen=True)
class Sampling:
    """Parameters of the choice of tokens."""

    temperature: float = 0.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens that add up to this probability."""
    seed: int = 0
    """Equal seeds choose equal tokens from equal logits."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigurationError("temperature", self.temperature, "0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError("top_p", self.top_p, "more than 0, at most 1")

    def chooser(self, device: torch.device) -> TokenChooser:
        """Return a chooser with its own random sequence."""
        return TokenChooser(self, torch.Generator(device).manual_seed(self.seed))


@dataclass(frozen=True)
class TokenChooser:
    """Chooses the tokens of one request."""

    sampling: Sampling
    generator: torch.Generator

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token.

        :param logits: shape (vocabulary,).
        """
        if not self.sampling.temperature:
            return int(logits.argmax())
        probabilities = (logits.float() / self.sampling.temperature).softmax(-1)
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= self.sampling.top_p] = 0.0
        return int(order[torch.multinomial(ordered, 1, generator=self.generator)])
