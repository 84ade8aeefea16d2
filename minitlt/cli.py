"""The command line. Heavy imports live inside the commands, so that `--help` answers at once.

Errors a user can mend (a bad model, file, flag, key) are one line and exit code 2; a failed run
is exit code 1; an interrupted one 130.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="GRPO on TRL with lossless speculative rollouts and a drafter trained in idle time.",
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _fail(message: object, code: int = 2) -> None:
    print(f"minitlt: {' '.join(str(message).split())}", file=sys.stderr)
    raise typer.Exit(code)


def _one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """ValueErrors become one line and exit code 2; a failed run becomes one line and code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from minitlt.launch import RunFailed

        try:
            return command(*args, **kwargs)
        except RunFailed as error:
            _fail(error, 1)
        except ValueError as error:
            _fail(error)

    return wrapped


@app.command(context_settings=_PASS_ON)
@_one_line_errors
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="A YAML file instead of a recipe.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-TIME.")] = None,
    nproc: Annotated[int, typer.Option(help="Ranks; 0 = as the recipe says.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Check everything, print it, run nothing.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
) -> None:
    """Train with GRPO: minitlt train [RECIPE] [--any_field_of_TRLs_or_ours VALUE ..].

    The first word may name a recipe (see `minitlt recipes`).

    Examples:

        minitlt train

        minitlt train 01_smollm2_cpu --max_steps 20 --rollout.dtype bf16

        minitlt train --config my.yaml --dry-run

        minitlt train --resume runs/01_smollm2_cpu-20260101-120000
    """
    from minitlt.config import DEFAULT_RECIPE, find_recipe, load_config, parse_overrides

    arguments = list(context.args)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("--") else ""
    overrides = parse_overrides(arguments)
    if nproc:
        overrides["nproc"] = nproc
    if resume is not None:
        if recipe or config:
            _fail("--resume goes on with the run's own config; leave recipe and --config out")
        source = resume / "config.yaml"
        if not source.is_file():
            _fail(f"{resume} is not a run folder: it holds no config.yaml")
        run_dir = resume
    elif recipe and config:
        _fail("give a recipe or --config, not both")
    else:
        source = config or find_recipe(recipe or DEFAULT_RECIPE)
    settings = load_config(source, overrides)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _train_rank(settings, run_dir or Path("runs") / source.stem, resume is not None)
    else:
        _train_parent(settings, source.stem, run_dir, resume is not None, dry_run)


def _train_rank(settings: Any, run_dir: Path, resume: bool) -> None:
    """One rank of a run, under our launcher, torchrun or accelerate."""
    _quiet()
    from minitlt.run import last_checkpoint, prepare, train

    run_dir.mkdir(parents=True, exist_ok=True)
    prepared = prepare(settings, run_dir, int(os.environ["WORLD_SIZE"]))
    try:
        train(prepared, run_dir, last_checkpoint(run_dir) if resume else None)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _train_parent(
    settings: Any, name: str, run_dir: Path | None, resume: bool, dry_run: bool
) -> None:
    _quiet()
    from minitlt.launch import finish, launch, open_run_folder
    from minitlt.run import last_checkpoint, prepare

    run_dir = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not resume and (run_dir / "events.jsonl").exists():
        _fail(f"{run_dir} already holds a run; choose another --run-dir or use --resume {run_dir}")
    prepared = prepare(settings, run_dir)
    if dry_run:
        print(settings.as_yaml(), end="")
        print("\n".join(f"# {line}" for line in prepared.algebra))
        return
    if resume:
        print(f"resuming from {last_checkpoint(run_dir)}")
    open_run_folder(run_dir, settings.as_yaml())
    command = [sys.executable, "-m", "minitlt.cli", "train", "--run-dir", str(run_dir)]
    command += ["--resume", str(run_dir)] if resume else ["--config", str(run_dir / "config.yaml")]
    print(f"run folder: {run_dir}")
    try:
        launch(
            command,
            run_dir,
            settings.nproc,
            prepared.args.max_steps,
            on_cpu=bool(prepared.args.use_cpu),
        )
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: minitlt train --resume {run_dir}", file=sys.stderr)
        raise typer.Exit(130) from None
    finish(run_dir)


def _quiet() -> None:
    """Libraries' progress bars and telemetry have no place beside our display."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "TRL_EXPERIMENTAL_SILENCE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@app.command()
@_one_line_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; default RUN/report.html.")] = None,
) -> None:
    """Draw a run's report again, or one page that compares several runs.

    Example:

        minitlt report runs/a runs/b --out compare.html
    """
    from minitlt.page import render_report

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("compare.html"))
    print(render_report(runs, target))


@app.command()
def recipes() -> None:
    """List the recipes that come with the package.

    Example:

        minitlt recipes
    """
    from minitlt.config import recipe_paths

    for name, path in recipe_paths().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:24} {first.lstrip('# ')}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
