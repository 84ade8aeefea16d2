"""Where a run ends early on this rank, and where it goes on.

A run ends after a step, never inside one if that can be helped: asked to, by a signal or a file,
with a checkpoint; with an error and without one when the policy has diverged, since nothing could
go on from that. A rank whose launcher is gone asks itself. It goes on from the newest checkpoint
that is whole, or from the start.

Left out: a limit to the time that a step takes after a signal; launchers have one.
How to try it: Ctrl-C in `minitlt train`; `pytest -m slow tests/test_faults.py -k interrupt`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from minitlt.common import is_whole
from minitlt.config import ConfigError, read_mapping
from minitlt.launch import REPEAT_SECONDS, STOP_FILE, RunFailed
from minitlt.weights import full_parameters, is_zero3

ORPHAN_SECONDS = 40.0  # for the current step and a checkpoint, once the launcher is gone


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, newest first, whole or not."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.split("-")[-1].isdigit()]
    return sorted(found, key=lambda p: -int(p.name.split("-")[-1]))


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run, from which it goes on; None: from the start.

    Raises ConfigError where there is no run, or one whose checkpoints cannot be gone on from.
    """
    config = read_mapping(run_dir / "config.yaml")
    found = next(filter(is_whole, checkpoints(run_dir / "checkpoints")), None)
    if found and config.get("save_only_model"):
        raise ConfigError(
            f"{run_dir}: save_only_model left no optimizer in its checkpoints to go on with; start "
            f"a new run from the policy: --model_name_or_path {found}"
        )
    return found


def way_on(run_dir: Path, command: str = "") -> str:
    """How a run that was stopped goes on, in words. command: what stands before --resume."""
    try:
        found = last_checkpoint(run_dir)
    except ConfigError as error:
        return str(error)
    start = found.name if found else "the start, as no checkpoint was whole yet"
    return f"{command}--resume {run_dir} goes on from {start}"


class AlreadyTrained(Exception):
    """The checkpoint that the run went on from is that of its last step; everything is loaded."""


class StopCallback(TrainerCallback):
    """Ends the run after a step: with a checkpoint when a rank was asked to stop (SIGINT, SIGTERM,
    a file `stop` in the run folder), with an error and without one when the policy has diverged.

    A rank whose launcher was killed stops as well; after ORPHAN_SECONDS at any cost.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.asked = run_dir, 0.0
        self._close: Callable[[], None] = lambda: None
        if launcher := os.environ.get("MINITLT_LAUNCHER"):
            parent = int(launcher) or os.getppid()  # 0: accelerate's process
            threading.Thread(target=self._watch, args=(parent,), daemon=True).start()

    def listen(self, close: Callable[[], None]) -> None:
        """From here on signals are wishes. close() waits for the last checkpoint and takes the
        rank's files in shared memory away."""
        self._close = close
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.asked and now - self.asked > REPEAT_SECONDS:
            raise KeyboardInterrupt
        self.asked = self.asked or now

    def _watch(self, launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        patience = 5.0 if self.asked else ORPHAN_SECONDS  # asked: it has had its time
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
        closing = threading.Thread(target=self._close, daemon=True)  # it may wait for a disk
        closing.start()
        closing.join(5.0)
        os._exit(1)

    def obey(self, device: torch.device) -> None:
        """Raises KeyboardInterrupt on all ranks if any was asked to stop. Collective."""
        if _any_rank(device, bool(self.asked))[0]:
            raise KeyboardInterrupt

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """transformers would train another step before it sees that all are done."""
        if state.global_step >= state.max_steps:
            raise AlreadyTrained

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """All ranks do the same at the same step, whichever heard the signal first."""
        wish = bool(self.asked) or (self.run_dir / STOP_FILE).exists()
        asked, diverged = _any_rank(args.device, wish, not _is_finite(model))
        if diverged:
            self._refuse(state.global_step)
        if asked:
            self.asked = self.asked or time.monotonic()
            control.should_save = control.should_training_stop = True
        self._check_what_is_saved(state, control, model)

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self._check_what_is_saved(state, control, model)

    def _check_what_is_saved(self, state: Any, control: Any, model: Any) -> None:
        """Before a checkpoint (not one that save_strategy `best` decides on later). ZeRO-3 shows
        nothing of the weights unless they are gathered, which is done for what is saved anyway; if
        nothing is saved the engine's refresh sees them."""
        if control.should_save and is_zero3(next(model.parameters())):
            try:
                deque(full_parameters(model), maxlen=0)
            except FloatingPointError:
                self._refuse(state.global_step)

    def _refuse(self, step: int) -> NoReturn:
        self._close()  # the checkpoint before this step may just be written
        raise RunFailed(
            f"after step {step} the policy's weights are not finite: it has diverged, and this "
            f"step is not saved; {way_on(self.run_dir)}; a lower learning_rate may help"
        )


def _any_rank(device: torch.device, *flags: bool) -> list[bool]:
    """Each flag, whether it is set on any rank. Collective."""
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


@torch.no_grad()
def _is_finite(model: Any) -> bool:
    """Whether what this rank holds of the trained weights has neither NaN nor infinity.

    Norms of gradients say less: an infinite one may be a step that mixed precision skips.
    """
    trained = (p for p in model.parameters() if p.requires_grad)
    shares = (p.to_local() if hasattr(p, "to_local") else p for p in trained)
    sums = [share.sum(dtype=torch.float32) for share in shares]  # neither gets lost in a sum
    return not sums or bool(torch.stack(sums).isfinite().all())
