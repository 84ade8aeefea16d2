"""Training the drafter on what the rollout has already computed.

The idea. A finished row's taps are complete training data: the inputs (three hidden states per
position), the next tokens, and the last hidden state, from which the target's own logits follow by
one product. No forward of the target is ever made for training. The `ReplayBuffer` keeps rows by
tokens and mixes this step's finished rows, which are the short ones, with the longest rows of the
steps before (TLT, arXiv 2511.16665: one-step-off sampling). The `DrafterTrainer` takes windows of
rows, packs them behind one another (no padding; attention stays inside a document) and unrolls the
drafter on its own states (EAGLE-3's training-time test, see `Eagle3Drafter.unroll`).

What is supervised, for a row x_0..x_{L-1} whose first P tokens are the prompt: the pair whose token
is x_j teaches p(. | x_<=j) iff x_j is a response token and the target has read it, P <= j <= L - 2.
At unrolled step s pair t holds x_{t+1+s}, so j = t + 1 + s: the mask moves with the token. The
teacher is softmax(head(final_norm(h_j))) over the draft vocabulary.

A train step is short, so that a rank leaves the idle window at once: its size follows the clock to
stay under 250 ms on a CPU and 50 ms on a GPU. With `pack_tokens` the size is fixed instead, and a
resumed run takes exactly the steps that an uninterrupted one would have taken.

Left out: FSDP (one layer fits every rank; ranks take local steps and spot.py averages), gradients
through the target, rejected drafts as data.

How to run: `pytest tests/test_distill.py`.

Shape suffixes: N pairs, M query pairs, S unrolled steps, R supervised (pair, step) combinations,
J teacher positions, L row tokens, F = 3H taps, H hidden, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minitlt.common import by_piece
from minitlt.eagle3 import (
    DrafterConfig,
    Eagle3Drafter,
    Pack,
    file_header,
    product_dtype,
)
from minitlt.kernels import draft_loss

_FIRST_SIZE = 16  # pairs of the first step, before anything is known about speed
_SMALLEST, _LARGEST = 8, 16_384
_SHORTEST = 32  # pairs of a window, where the step and the row have as many
_TARGET_SHARE = 0.8  # of the time budget that a step aims at
_DECAY = 8  # a count loses 1/8 per step, so the draft vocabulary follows the policy
_COUNT = 1024  # what one token adds to a count: expected counts are fractions
# Positions whose whole law is computed for the counts: when a vocabulary is chosen from this rank's
# rows alone, and else, as it takes a part of the idle window (about 0.1 s of one CPU core).
_MOST_LAWS, _LAWS = 512, 64


@dataclass(eq=False)
class Row:
    """A finished row: all L tokens, and the taps of the L - 1 that the target has read."""

    tokens_L: Tensor
    prompt_len: int
    features_NF: Tensor
    hidden_NH: Tensor
    step: int
    counted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_L)


@dataclass(frozen=True)
class Window:
    """Pairs start..stop-1 of a row are queries; the pairs from `context` on are seen."""

    row: Row
    context: int
    start: int
    stop: int


class ReplayBuffer:
    """Finished rows, at most `config.buffer_tokens` tokens of them.

    When it is full, rows of the oldest step go first, the shortest of them first, until earlier
    steps hold no more than `long_share` of it; then the shortest of this step: what remains are
    the longest rows. 8H bytes per token in bfloat16 (SmolLM2-135M 4.6 KB).

    target_head: returns the target's head [W, H]; set by the trainer, read by `expect`.
    """

    def __init__(self, config: DrafterConfig | None = None, *, vocab_size: int) -> None:
        self.config = config or DrafterConfig()
        self.rows: list[Row] = []
        self.step = self.num_tokens = 0
        self.target_head: Callable[[], Tensor] | None = None
        self._counts_W = torch.zeros(vocab_size, dtype=torch.int64)

    def add(
        self, tokens: list[int], prompt_len: int, features_NF: Tensor, hidden_NH: Tensor
    ) -> None:
        """Takes over the tensors. Rows that could not teach anything are dropped."""
        assert len(features_NF) == len(hidden_NH) == len(tokens) - 1
        if len(tokens) - prompt_len < 2:
            return
        self.rows.append(Row(torch.tensor(tokens), prompt_len, features_NF, hidden_NH, self.step))
        self.num_tokens += len(tokens)
        while self.num_tokens > (most := self.config.buffer_tokens) and len(self.rows) > 1:
            old = sum(row.num_tokens for row in self.rows if row.step < self.step)
            spared = old <= self.config.long_share * most  # the old rows, if there are others
            worst = min(
                self.rows, key=lambda r: (spared == (r.step < self.step), r.step, r.num_tokens)
            )
            self._count(worst)
            self.rows.remove(worst)
            self.num_tokens -= worst.num_tokens

    def next_step(self) -> None:
        """A new rollout begins: what is here now is old."""
        self.step += 1
        self._counts_W -= self._counts_W // _DECAY

    def expect(self, num_laws: int) -> None:
        """Counts the rows that are new by what the target expects in them, and not only by what was
        drawn: `num_laws` of their response positions count with the target's whole law there.

        From few rows that tells far more of the rare tokens (4,096 tokens chosen from 4,400, with
        512 laws, covered 0.920 of fresh ones instead of 0.873).
        """
        new = [row for row in self.rows if not row.counted]
        if new and self.target_head is not None:
            self._counts_W += _expected_counts(new, self.target_head(), num_laws)
            for row in new:
                row.counted = True

    def counts(self) -> Tensor:
        """How often each token is to be expected in recent responses of this rank, int64 [W], in
        units of 1/1024 token. Rows that `expect` has not seen count with their own tokens."""
        for row in self.rows:
            self._count(row)
        return self._counts_W.clone()

    def _count(self, row: Row) -> None:
        if not row.counted:
            tokens_R = row.tokens_L[row.prompt_len :]
            self._counts_W += _COUNT * tokens_R.bincount(minlength=len(self._counts_W))
            row.counted = True

    def sample(self, num_pairs: int, num_steps: int, random: torch.Generator) -> list[Window]:
        """Windows with `num_pairs` query pairs in all, or fewer if the buffer holds no more.

        Each is drawn from the old rows with probability `long_share`, otherwise from this step's
        (one kind alone if the other is empty), by supervised pairs within the kind, no row twice.
        """
        spans = [_query_span(row, num_steps) for row in self.rows]
        sizes = torch.tensor([stop - start for start, stop in spans], dtype=torch.float64)
        old = torch.tensor([row.step < self.step for row in self.rows], dtype=torch.bool)
        longest = min(self.config.window_tokens, max(num_pairs // 4, _SHORTEST))
        windows: list[Window] = []
        while num_pairs > 0 and sizes.sum() > 0:
            chance = torch.rand((), generator=random).item()
            kind = old if chance < self.config.long_share else ~old
            weights = torch.where(kind, sizes, 0.0)
            if weights.sum() == 0:
                weights = sizes
            index = int(torch.multinomial(weights, 1, generator=random))
            (start, stop), row = spans[index], self.rows[index]
            length = min(stop - start, longest, num_pairs)
            # Around a pair drawn evenly: a row's ends are in no fewer than half as many windows.
            middle = start + int(torch.randint(stop - start, (), generator=random))
            start = min(max(start, middle - length // 2), stop - length)
            context = max(0, start - self.config.context_tokens)
            windows.append(Window(row, context, start, start + length))
            sizes[index] = 0.0
            num_pairs -= length
        return windows

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as new tensors on the CPU, where rows of a resumed run are anyway."""
        empty = torch.zeros(0)
        return {
            "counts": self._counts_W.clone(),
            "step": torch.tensor(self.step),
            "shapes": torch.tensor(
                [[r.num_tokens, r.prompt_len, r.step, r.counted] for r in self.rows],
                dtype=torch.int64,
            ).view(-1, 4),
            "tokens": torch.cat([row.tokens_L for row in self.rows]) if self.rows else empty.long(),
            "features": torch.cat([r.features_NF.cpu() for r in self.rows]) if self.rows else empty,
            "hidden": torch.cat([r.hidden_NH.cpu() for r in self.rows]) if self.rows else empty,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._counts_W, self.step = state["counts"].clone(), int(state["step"])
        shapes = state["shapes"].tolist()
        lengths = [length for length, *_ in shapes]
        pairs = [length - 1 for length in lengths]
        tensors = (state["tokens"].split(lengths), state["features"].split(pairs),
                   state["hidden"].split(pairs))  # fmt: skip
        self.rows = [
            Row(tokens.clone(), prompt_len, features.clone(), hidden.clone(), step, bool(counted))
            for (_, prompt_len, step, counted), tokens, features, hidden in zip(
                shapes, *tensors, strict=True
            )
        ]
        self.num_tokens = sum(lengths)


@torch.no_grad()
def _expected_counts(rows: list[Row], head_WH: Tensor, num_laws: int) -> Tensor:
    total = sum(row.num_tokens - row.prompt_len for row in rows)
    stride, at, parts = -(-total // num_laws), 0, []
    for row in rows:  # every stride-th position of all rows behind one another
        parts.append(row.hidden_NH[row.prompt_len - 1 + at :: stride].to(head_WH))
        at = (at + row.prompt_len - row.num_tokens) % stride
    hidden = torch.cat(parts)
    mass_W = torch.zeros(len(head_WH), dtype=torch.float64, device=head_WH.device)
    for chunk_NH in hidden.split(64):
        mass_W += (chunk_NH @ head_WH.T).float().softmax(-1).sum(0)
    return (mass_W * (_COUNT * total / len(hidden))).round().long().cpu()


def _query_span(row: Row, num_steps: int) -> tuple[int, int]:
    """The pairs (start, stop) that are supervised at one of the steps at least."""
    return max(0, row.prompt_len - num_steps), row.num_tokens - 2


def make_pack(
    windows: list[Window], num_steps: int, device: torch.device
) -> tuple[Pack, Tensor, Tensor]:
    """The windows side by side, with what they are taught.

    Returns (pack, hidden_JH, teacher_SM): the last hidden states of all teaching positions, and for
    every step and query the row of hidden_JH that teaches it, -1 where nothing does.
    """
    features, tokens, positions, queries, later, documents = [], [], [], [], [], []
    hidden, teachers, num_pairs, num_teachers = [], [], 0, 0
    step_S1 = torch.arange(num_steps)[:, None]
    for w in windows:
        row, last = w.row, w.row.num_tokens - 1
        # Rows of a resumed run are on the CPU.
        features.append(row.features_NF[w.context : w.stop].to(device))
        tokens.append(row.tokens_L[w.context + 1 : w.stop + 1])
        positions.append(torch.arange(w.context, w.stop))
        queries.append(torch.arange(w.start, w.stop) - w.context + num_pairs)
        documents.append((w.stop - w.context, w.stop - w.start))
        token_SM = torch.arange(w.start, w.stop) + 1 + step_S1  # the index in the row
        later.append(torch.where(token_SM <= last, row.tokens_L[token_SM.clamp(max=last)], 0))
        first = max(w.start + 1, row.prompt_len)
        stop = min(w.stop + num_steps, last)
        taught_SM = (token_SM >= first) & (token_SM < stop)
        teachers.append(torch.where(taught_SM, token_SM - first + num_teachers, -1))
        hidden.append(row.hidden_NH[first:stop].to(device))
        num_pairs += w.stop - w.context
        num_teachers += stop - first
    pack = Pack(
        torch.cat(features).to(device),
        torch.cat(tokens).to(device),
        torch.cat(positions).to(device),
        torch.cat(queries).to(device),
        torch.cat(later, 1).to(device),
        documents,
    )
    return pack, torch.cat(hidden).to(device), torch.cat(teachers, 1).to(device)


class DrafterTrainer:
    """AdamW on the drafter, one short step at a time, over a replay buffer.

    What takes the steps is a twin of the drafter, the student. The drafter, which drafts and is
    published, merged and saved, is the running average of the student's weights over the last
    1 / (1 - `average`) steps (at the start over fewer): the noise of single steps averages out.

    All sampling comes from its own generator. `version` counts steps; it is what hot swap and the
    merge across ranks go by. The draft vocabulary changes only in `refresh_vocab`, which the owner
    calls when all ranks can call it with the same counts: the ranks' heads stay comparable.
    """

    def __init__(
        self, drafter: Eagle3Drafter, buffer: ReplayBuffer, config: DrafterConfig | None = None
    ) -> None:
        self.drafter, self.buffer = drafter, buffer
        self.config = config = config or DrafterConfig()
        self.version, self.header = 0, file_header(drafter.config)
        self.rate_scale = 1.0  # a schedule of the owner's, e.g. warm-up's fall to the end
        self.student = drafter.twin()
        buffer.target_head = drafter.target_head
        self.random = torch.Generator().manual_seed(config.seed)
        self._size = float(config.pack_tokens or _FIRST_SIZE)
        self._narrow = product_dtype(config.train_dtype, drafter.fc) == torch.bfloat16
        body = [p for name, p in self.student.named_parameters() if name != "head"]
        groups: list[dict[str, Any]] = [{"params": body, "rate": config.learning_rate}]
        if self.student.head is not None:
            groups.append({"params": [self.student.head], "rate": config.head_learning_rate})
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        for parameter in self.student.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def budget_seconds(self) -> float:
        default = 50.0 if self.drafter.fc.is_cuda else 250.0
        return (self.config.train_step_ms or default) / 1000.0

    def train_step(self) -> dict[str, Any]:
        """One optimizer step.

        Returns loss, tokens (supervised pairs, unrolled steps counted once), seconds,
        buffer_tokens, and acceptance: per unrolled step the mean of sum_v min(p_v, q_v), what an
        optimal verifier would accept of drafts within the draft vocabulary. tokens == 0: the buffer
        is empty. If loss or gradient is not finite, the weights are left alone and loss is not
        finite.
        """
        self.buffer.expect(_LAWS)  # of a step's rows once, in its window
        started = time.perf_counter()
        windows = self.buffer.sample(int(self._size), self.config.ttt_steps, self.random)
        if not windows:
            return {"loss": 0.0, "tokens": 0, "seconds": 0.0, "buffer_tokens": 0, "acceptance": []}
        loss, acceptance = self.loss(windows)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), self.config.clip)
        value = loss.item() if math.isfinite(norm.item()) else math.nan
        if math.isfinite(value):
            warm = min(1.0, (self.version + 1) / max(self.config.warmup_steps, 1))
            for group in self.optimizer.param_groups:
                group["lr"] = group["rate"] * warm * self.rate_scale
            self.optimizer.step()
            self.version += 1
            decay = min(self.config.average, (1 + self.version) / (10 + self.version))
            with torch.no_grad():
                own = zip(self.drafter.parameters(), self.student.parameters(), strict=True)
                for average, raw in own:
                    average.lerp_(raw, 1 - decay)
        if self.drafter.fc.is_cuda:
            torch.cuda.synchronize(self.drafter.fc.device)  # AdamW and the average are under way
        seconds = time.perf_counter() - started
        num_pairs = sum(w.stop - w.start for w in windows)
        self._adapt(num_pairs, seconds)
        return {
            "loss": value,
            "tokens": num_pairs,
            "seconds": seconds,
            "buffer_tokens": self.buffer.num_tokens,
            "acceptance": acceptance.tolist(),
        }

    def loss(self, windows: list[Window]) -> tuple[Tensor, Tensor]:
        """The loss of these windows (with its graph) and the acceptance per unrolled step [S].

        loss = sum_s ttt_decay^s * mean over the step's supervised pairs. A first draft is always
        needed, a fourth one seldom: step s unrolls only 1 / (s + 1) of the windows.
        """
        c, drafter = self.config, self.student
        device = drafter.fc.device
        pack, hidden_JH, teacher_SM = make_pack(windows, c.ttt_steps, device)
        drafter.reserve_positions(max(w.stop for w in windows) + c.ttt_steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._narrow):
            with torch.no_grad():
                rows = drafter.target_rows()
                teacher_JV = (hidden_JH.to(rows.dtype) @ rows.T).to(rows.dtype)
            states = drafter.unroll(pack, c.ttt_steps, thin=True)
            for step, h_MH in enumerate(states):
                teacher_SM[step, len(h_MH) :] = -1
            states_SMH = nn.utils.rnn.pad_sequence(states, batch_first=True)
            step_R, query_R = (teacher_SM >= 0).nonzero(as_tuple=True)
            logits_RV = drafter.logits(states_SMH[step_R, query_R])
        loss_R, accept_R = draft_loss(logits_RV, teacher_JV[teacher_SM[step_R, query_R]], c.loss)
        num_S = torch.bincount(step_R, minlength=c.ttt_steps).clamp(min=1)
        weight_S = c.ttt_decay ** torch.arange(c.ttt_steps, device=device) / num_S
        sums_S = torch.zeros(c.ttt_steps, dtype=accept_R.dtype, device=device)
        acceptance_S = sums_S.index_add(0, step_R, accept_R.detach()) / num_S
        return (loss_R * weight_S[step_R]).sum(), acceptance_S

    def _adapt(self, num_pairs: int, seconds: float) -> None:
        """The next step's size. A step cut short by a small buffer says of larger ones only that
        they take too long, if this one did."""
        ratio = _TARGET_SHARE * self.budget_seconds / seconds
        cut_short = num_pairs < int(self._size)
        if self.config.pack_tokens or (cut_short and ratio > 1):
            return
        # Slow to grow and quick to shrink: an overlong step holds up the whole job.
        size = (num_pairs if cut_short else self._size) * min(max(ratio, 0.5), 1.25)
        self._size = float(min(max(size, _SMALLEST), _LARGEST))

    # What merging and hot swap need (merge.Trainable).

    def free(self) -> None:
        """Gradients and cached blocks; the moments stay, as the ranks' merges need them."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.drafter.fc.is_cuda:
            torch.cuda.empty_cache()

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.drafter.named_parameters()), "ids_V": self.drafter.ids_V}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.student.named_parameters()
            for key, value in {**self.optimizer.state[parameter], "raw": parameter.detach()}.items()
        }

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        own = self.tensors()
        if set(tensors) != set(own):
            raise ValueError(f"not the drafter's tensors: {sorted(set(tensors) ^ set(own))}")
        self.set_vocab(tensors["ids_V"].tolist())
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self.student.load_state_dict(own)
        self.version = version

    # The draft vocabulary.

    def refresh_vocab(self, counts_W: Tensor | None = None) -> bool:
        """Takes the most frequent tokens as the draft vocabulary if that adds `vocab_gain`.

        Deterministic in its inputs, so ranks that agree on counts agree afterwards; None: those of
        this rank's own rows. Returns whether anything changed.
        """
        if counts_W is None:
            self.buffer.expect(_MOST_LAWS)
            counts_W = self.buffer.counts()
        total, old_V = int(counts_W.sum()), self.drafter.ids_V.cpu()
        if not self.drafter.config.reduced or not total:
            return False
        new_V = choose_vocab(counts_W, len(old_V), old_V)
        gain = int(counts_W[new_V].sum() - counts_W[old_V].sum()) / total
        if gain <= 0 or gain < self.config.vocab_gain:
            return False
        self.set_vocab(new_V.tolist())
        return True

    def choose_vocab(self) -> list[int]:
        """The draft vocabulary after a look at this rank's own rows."""
        self.refresh_vocab()
        return list(self.drafter.ids_V.tolist())

    def set_vocab(self, ids: list[int]) -> None:
        """Changes the draft vocabulary (ascending ids). Trained head rows (and their moments) of
        tokens that stay are kept; new rows are the target's."""
        old_V = self.drafter.ids_V
        new_V = torch.tensor(ids, device=old_V.device)
        place_V = torch.searchsorted(old_V, new_V).clamp(max=len(old_V) - 1)
        kept_V1 = (old_V[place_V] == new_V)[:, None]
        with torch.no_grad():
            for model in (self.student, self.drafter):
                model.ids_V.copy_(new_V)
                if model.head is not None:
                    own = torch.where(kept_V1, model.head[place_V], model.target_rows())
                    model.head.copy_(own)
            if self.student.head is not None:
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = self.optimizer.state[self.student.head][key]
                    moment.copy_(torch.where(kept_V1, moment[place_V], 0.0))

    # Checkpoints.

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer, buffer, generator and step size, as a flat dict of tensors: what `tensors`
        and `version` lack of the whole."""
        state = {f"optimizer.{k}": v.clone() for k, v in self.optimizer_tensors().items()}
        state |= {f"buffer.{k}": v for k, v in self.buffer.state_dict().items()}
        state["size"] = torch.tensor(self._size, dtype=torch.float64)
        state["random"] = self.random.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """After `load`: continues exactly where `state_dict` was taken (for the same sizes and
        config)."""
        parts = by_piece(state)
        own = self.optimizer_tensors()
        if set(own) != set(parts["optimizer"]):
            raise ValueError("the checkpoint belongs to another drafter")
        for name, tensor in parts["optimizer"].items():
            own[name].copy_(tensor)
        self.buffer.load_state_dict(parts["buffer"])
        self._size = float(state["size"])
        self.random.set_state(state["random"].cpu())


def choose_vocab(counts_W: Tensor, size: int, keep_V: Tensor | None = None) -> Tensor:
    """The `size` most frequent token ids, ascending, int64 [size].

    Ties, among them all tokens never seen, go to ids of `keep_V` (the vocabulary in use), then to
    the lowest id, so that a refresh changes no more rows than it must.
    """
    if size > counts_W.numel():
        raise ValueError(f"a draft vocabulary of {size} from {counts_W.numel()} tokens")
    order = torch.arange(counts_W.numel())
    if keep_V is not None:
        kept = torch.zeros(counts_W.numel(), dtype=torch.bool)
        kept[keep_V.cpu()] = True
        order = order[(~kept).long().argsort(stable=True)]
    by_count = counts_W.cpu()[order].argsort(descending=True, stable=True)
    return order[by_count[:size]].sort().values
