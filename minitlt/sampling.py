"""How a token is drawn: the options, and the logits that a sample is taken from.

Names, defaults and the order of effects are those of transformers' logits processors: repetition
penalty, minimum length, suppressed ids (`process_logits`), then temperature, top-k, top-p and
min-p (`kernels.sampling_thresholds`). Plain and speculative decoding share this one path, and a
drafted token counts as history for the tokens behind it.

Left out: beam search, logit bias, penalties by frequency; whatever else looks at a whole rollout.
How to run: `pytest tests/test_sampling.py`.

Shape suffixes: B rows, T tree nodes (root included), D emitted tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minitlt.draft import Draft, ancestor_bits, depths
from minitlt.kernels import Verified, logprob, scaled


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and where a row ends.

    top_k 0, top_p 1.0, min_p 0.0 and repetition_penalty 1.0 are off. T = 0 is exact argmax.
    A row ends behind a token of stop_ids, or behind the token that completes one of stop_strings
    in the completion's text; both are kept.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be 0 or more": self.temperature >= 0,
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be positive": self.repetition_penalty > 0,
            "min_new_tokens must be 0 or more": self.min_new_tokens >= 0,
            "stop_strings must be a tuple of texts that are not empty": (
                isinstance(self.stop_strings, tuple) and all(self.stop_strings)
            ),
        }
        if wrong := [text for text, right in checks.items() if not right]:
            raise ValueError(f"sampling: {wrong[0]}")

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def rewrites(self) -> bool:
        return self.repetition_penalty != 1 or self.min_new_tokens > 0 or bool(self.suppress_ids)

    def stops_by_text(
        self, before: Sequence[int], new: Sequence[int], decode: Callable[[list[int]], str]
    ) -> tuple[int, bool]:
        """(how many of the new tokens stand, whether the last of them completes a stop string).

        A token holds at least one byte, so a string that ends with a token lies in the last
        len(bytes) of them (and one more, whose leading space some tokenizers drop).
        """
        window = 1 + max(len(text.encode()) for text in self.stop_strings)
        tokens = [*before[-window:], *new]
        for end in range(len(tokens) - len(new) + 1, len(tokens) + 1):
            text = decode(tokens[max(0, end - window) : end])
            if any(stop in text for stop in self.stop_strings):
                return len(new) - len(tokens) + end, True
        return len(new), False


def process_logits(
    logits_BTV: Tensor,
    draft: Draft,
    params: SamplingParams,
    seen: Sequence[set[int]],
    num_emitted: Sequence[int],
) -> Tensor:
    """What the sample is drawn from, in a new tensor: penalty, minimum length, suppressed ids.

    seen: per row the ids of prompt and completion; num_emitted: its completion's length. A node's
    history is that and the drafts on its path, so a drafted block sees what plain decoding would.
    """
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)  # as transformers has them
    scores, device = logits_BTV.to(wide, copy=True), logits_BTV.device
    if params.repetition_penalty != 1:
        seen_BTV = torch.zeros_like(scores, dtype=torch.bool)
        for b, ids in enumerate(seen):
            seen_BTV[b, :, list(ids)] = True
        at_T = torch.arange(draft.tokens_BT.shape[1], device=device)
        on_path = ((ancestor_bits(draft.parents_BT)[:, :, None] >> at_T) & 1).bool()
        row, n, m = torch.nonzero(on_path & (draft.tokens_BT >= 0)[:, None], as_tuple=True)
        seen_BTV[row, n, draft.tokens_BT[row, m]] = True
        penalty = params.repetition_penalty
        penal = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen_BTV, penal, scores)
    if params.min_new_tokens and params.stop_ids:
        at_BT = torch.tensor(num_emitted, device=device)[:, None] + depths(draft.parents_BT)
        early_BT1 = (at_BT < params.min_new_tokens)[:, :, None]
        stop = torch.tensor(params.stop_ids, device=device)
        scores[:, :, stop] = scores[:, :, stop].masked_fill(early_BT1, -torch.inf)
    if params.suppress_ids:
        scores[:, :, list(params.suppress_ids)] = -torch.inf
    return scores


def rescore(verified: Verified, logits_BTV: Tensor, temperatures_B: Tensor) -> None:
    """Writes the logprobs of the emitted tokens under softmax(logits / T) into `verified`."""
    live_BD = verified.nodes_BD >= 0
    b = live_BD.nonzero()[:, 0]
    x_NV = scaled(logits_BTV[b, verified.nodes_BD[live_BD]], temperatures_B[b])
    chosen_N = x_NV.gather(1, verified.tokens_BD[live_BD][:, None])[:, 0]
    verified.logprobs_BD[live_BD] = logprob(chosen_N, x_NV.logsumexp(-1)).float()
