"""The command line. Heavy imports live inside the commands, so that `--help` answers at once.

Errors a user can mend (a bad model, file, flag, key) are one line and exit code 2; a failed run
is exit code 1; an interrupted one 130.

Left out: shell completion, colours. What the commands do is in the modules they import.
How to run: `minitlt --help`, `minitlt train --help`.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Config = Annotated[Path | None, typer.Option(help="A YAML file instead of a recipe.")]
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _fail(message: object, code: int = 2) -> None:
    print(f"minitlt: {' '.join(str(message).split())}", file=sys.stderr)
    raise typer.Exit(code)


class _OneLineErrors(TyperGroup):
    """What is wrong with values and files becomes one line and exit code 2, a failed run one line
    and code 1; Ctrl-C is 130."""

    def get_help_option(self, ctx: Any) -> Any:
        if option := super().get_help_option(ctx):
            option.default = False  # or typer loads pydantic, 0.2 s, to read a None
        return option

    def invoke(self, ctx: Any) -> Any:
        from safetensors import SafetensorError

        from minitlt.launch import RunFailed

        _quiet()
        try:
            return super().invoke(ctx)
        except RunFailed as error:
            _fail(error, 1)
        except BrokenPipeError:  # | head; click ends quietly
            raise
        except (ValueError, OSError, SafetensorError) as error:
            _fail(error)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="GRPO on TRL with lossless speculative rollouts and a drafter trained in idle time. "
    "Begin with: minitlt train",
)


@app.command(context_settings=_PASS_ON)
def train(
    context: typer.Context,
    config: Config = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME-TIME.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Check everything, print it, run nothing.")] = False,
    smoke: Annotated[bool, typer.Option(help="Two steps of tiny sizes, to try the path.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
) -> None:
    """Train with GRPO.

    minitlt train [RECIPE] [--any_field_of_TRLs_or_ours VALUE ..]: the first word may name a recipe
    (see `minitlt recipes`), and --dry-run lists our fields and what they mean. --nproc is the
    number of ranks; with --accelerate-config (fsdp2, zero2, zero3 or a file) accelerate starts
    them. Under torchrun or accelerate launch it runs in place. Ctrl-C ends it after the current
    step with a checkpoint, or without one after 45 s; a file named `stop` in the run folder ends it
    after the step, however long that takes.

    Examples:

        minitlt train

        minitlt train 01_smollm2_cpu --max_steps 20 --rollout.dtype bf16

        minitlt train --config my.yaml --dry-run

        minitlt train 05_eight_gpus_math_7b_fsdp2 --accelerate-config zero3 --dry-run

        minitlt train --resume runs/01_smollm2_cpu-20260101-120000
    """
    if resume is not None:
        if config:
            _fail("--resume goes on with the run's own config; leave recipe and --config out")
        if run_dir not in (None, resume):
            _fail(f"--resume goes on in {resume}; leave --run-dir out")
        run_dir, config = resume, resume / "config.yaml"
        if smoke:
            _fail("--resume goes on with the run's own sizes; leave --smoke out")
        if not config.is_file():
            _fail(f"{resume} is not a run folder: it holds no config.yaml")
    name, settings = _settings(context, config, smoke)
    if config and resume:
        from minitlt.config import load_config, refuse_changes

        refuse_changes(load_config(config), settings)
    os.environ.update(settings.env)
    in_place = "WORLD_SIZE" in os.environ or "MINITLT_LAUNCHER" in os.environ
    if not run_dir:  # one name on all ranks
        run_dir = Path("runs") / (name if in_place else f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if dry_run:
        _dry_run(settings, run_dir, resume is not None)
    elif in_place:
        _train_rank(settings, run_dir, resume is not None)
    else:
        _train_parent(settings, run_dir, resume is not None)


def _settings(context: typer.Context, config: Path | None, smoke: bool = False) -> tuple[str, Any]:
    """[RECIPE] [--key VALUE ..], the words behind a command: the run's name and configuration."""
    from minitlt.config import DEFAULT_RECIPE, find_recipe, load_config, parse_overrides, shrink

    arguments = list(context.args)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("--") else ""
    if recipe and config:
        _fail("give a recipe or --config, not both; --resume brings its own")
    source, overrides = config or find_recipe(recipe or DEFAULT_RECIPE), parse_overrides(arguments)
    settings = load_config(source, overrides)
    if smoke:
        shrink(settings, overrides)
    return source.stem, settings


def _dry_run(settings: Any, run_dir: Path, resume: bool) -> None:
    """Says what would run. Under another launcher too, where rank 0 says it for all."""
    from minitlt.config import BLOCKS, describe
    from minitlt.run import prepare

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # with them TRL's configuration meets other ranks
    rank, world, _ = (os.environ.pop(name, "") for name in names)
    if int(rank or 0):
        return
    settings.nproc = int(world or settings.nproc)
    _check_unused(run_dir, resume)
    if settings.accelerate_config:
        _accelerate(settings, dry_run=True)
    prepared = prepare(settings, run_dir, lazy=True)
    print(settings.as_yaml(), end="")
    lines = [line for name in BLOCKS[1:] for line in describe(name, getattr(prepared, name))]
    print("\n".join(f"# {line}" for line in lines + prepared.algebra))


def _train_rank(settings: Any, run_dir: Path, resume: bool) -> None:
    """One rank of a run, under our launcher, torchrun or accelerate."""
    from minitlt.launch import finish, open_run_folder
    from minitlt.run import prepare, train
    from minitlt.stop import way_on

    alone = "MINITLT_LAUNCHER" not in os.environ  # no parent of ours looks after the folder
    world, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    if not alone and world != settings.nproc:
        _fail(f"accelerate_config {settings.accelerate_config} starts {world} ranks, not the "
              f"{settings.nproc} of nproc")  # fmt: skip
    if claim := os.environ.pop("MINITLT_CLAIM", ""):  # programs that we start outlive the run
        os.set_inheritable(int(claim), False)
    if alone and first:
        _check_unused(run_dir, resume)
    prepared = prepare(settings, run_dir, world)
    if alone and first:
        if resume:
            print(way_on(run_dir))
        open_run_folder(run_dir, settings.as_yaml())
    try:
        train(prepared, run_dir, resume)
    except KeyboardInterrupt:
        if alone and first:
            print(f"\nstopped; {way_on(run_dir)}", file=sys.stderr)
        raise
    if alone and first:
        finish(run_dir)


def _train_parent(settings: Any, run_dir: Path, resume: bool) -> None:
    from minitlt.launch import finish, launch, open_run_folder
    from minitlt.run import prepare
    from minitlt.stop import last_checkpoint, way_on

    _check_unused(run_dir, resume)
    launcher = _accelerate(settings) if settings.accelerate_config else []
    prepared = prepare(settings, run_dir)
    _check_devices(settings.nproc, bool(prepared.args.use_cpu), bool(launcher))
    if resume:
        last_checkpoint(run_dir)  # says why there is no going on
        print(way_on(run_dir))
    claim = open_run_folder(run_dir, settings.as_yaml())
    command = [sys.executable, *launcher, "-m", "minitlt", "train", "--run-dir", str(run_dir)]
    command += ["--resume", str(run_dir)] if resume else ["--config", str(run_dir / "config.yaml")]
    print(f"run folder: {run_dir}")
    try:
        on_cpu, steps = bool(prepared.args.use_cpu), prepared.args.max_steps
        launch(command, run_dir, settings.nproc, steps, on_cpu=on_cpu, agent=bool(launcher),
               claim=claim)  # fmt: skip
    except KeyboardInterrupt:
        print(f"\nstopped; {way_on(run_dir, 'minitlt train ')}", file=sys.stderr)
        raise
    finish(run_dir)


def _check_unused(run_dir: Path, resume: bool) -> None:
    if not resume and (run_dir / "events.jsonl").exists():
        _fail(f"{run_dir} already holds a run; choose another --run-dir or use --resume {run_dir}")


def _accelerate(settings: Any, dry_run: bool = False) -> list[str]:
    """The words that make accelerate launch the ranks; refuses what this machine cannot do."""
    from importlib.util import find_spec

    from minitlt.config import accelerate_file, read_mapping
    from minitlt.launch import free_port

    name, file = settings.accelerate_config, accelerate_file(settings.accelerate_config)
    wish = read_mapping(file)
    if wish.get("distributed_type") == "DEEPSPEED" and not find_spec("deepspeed") and not dry_run:
        _fail(f"accelerate_config {name}: needs deepspeed; pip install deepspeed")
    if wish.get("distributed_type") in ("FSDP", "DEEPSPEED") and not dry_run:
        import torch

        if not torch.cuda.is_available():
            _fail(f"accelerate_config {name}: needs GPUs, and torch sees none here")
    if wish.get("use_cpu") and settings.nproc > 1:
        _fail(f"accelerate_config {name}: accelerate starts one rank on a CPU; --nproc starts more")
    port = ["--main_process_port", str(free_port())]
    return ["-m", "accelerate.commands.launch", "--config_file", str(file), *port,
            "--num_processes", str(settings.nproc)]  # fmt: skip


def _check_devices(nproc: int, on_cpu: bool, accelerated: bool) -> None:
    import torch

    from minitlt.common import counted

    there, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if not on_cpu and not accelerated and nproc > there:
        _fail(f"nproc {nproc}: this machine has {counted(there, 'GPU')}; lower --nproc, give "
              "--use_cpu true, or see recipes/several_nodes.md")  # fmt: skip
    if on_cpu and nproc > 4 * cores:  # so many processes would take the machine down
        _fail(f"nproc {nproc}: this machine has {counted(cores, 'core')}; lower --nproc")


def _quiet() -> None:
    """Libraries' progress bars and telemetry have no place beside our display."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "TRL_EXPERIMENTAL_SILENCE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def _logs_of(*runs: Path) -> Iterator[None]:
    """An event that is not as it should be becomes one line."""
    try:
        yield
    except (ValueError, OSError):  # these say it themselves
        raise
    except (LookupError, TypeError, AttributeError) as error:
        _fail(f"the log of {' or '.join(map(str, runs))} is torn or foreign: {error!r}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Default: RUN/report.html.")] = None,
) -> None:
    """Draw a run's report, or compare runs.

    One page, and each picture as PNG beside it.

    Example:

        minitlt report runs/a runs/b --out compare.html
    """
    from minitlt.page import render_report

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("compare.html"))
    with _logs_of(*runs):
        print(render_report(runs, target))


@app.command()
def recipes() -> None:
    """List the recipes of the package.

    Example:

        minitlt recipes
    """
    from minitlt.config import recipe_paths

    found = recipe_paths()
    for name, path in found.items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:{max(map(len, found))}}  {first.lstrip('# ')}")


@app.command()
def copy(
    recipe: Annotated[str, typer.Argument(help="Its name, or the beginning of it.")],
    dest: Annotated[Path, typer.Argument(help="A new file, or a folder.")],
) -> None:
    """Copy a recipe, to change it.

    Example:

        minitlt copy 01_smollm2_cpu my.yaml
    """
    from minitlt.config import find_recipe

    source = find_recipe(recipe)
    target = dest / source.name if dest.is_dir() else dest
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        _fail(f"cannot write {target}: {error.strerror}; choose another name or folder")
    print(f"wrote {target}; run it with: minitlt train --config {target}")


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Folder, Hub id, or smollm2-135m.")] = "smollm2-135m",
    drafter: Annotated[str, typer.Option(help="Run folder, drafter folder or Hub id.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="JSONL file, 'prompt' per line.")] = None,
    prompt: Annotated[str, typer.Option(help="One prompt; its text is shown as it grows.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSONL file; rows in it are skipped.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per completion at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_new_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="With the row's index, all of its randomness.")] = 0,
    arms: Annotated[
        str, typer.Option(help="Ways to draft, e.g. off,eagle-3; none: all there are.")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16; auto: bf16 on a GPU or if lossless.")
    ] = "auto",
    max_rows: Annotated[int, typer.Option(help="Rows decoded at once; 0 = all that fit.")] = 0,
    raw: Annotated[bool, typer.Option(help="Text goes in as it is, without template.")] = False,
) -> None:
    """Generate with a model and a drafter.

    With or without a drafter: the same tokens, at another speed. Rows go to --out as they finish,
    with their index; the same command takes up a killed call. Speed, accept length: on stderr.

    Examples:

        minitlt generate --prompt "Why is the sky blue?"

        minitlt generate --model runs/a/policy --drafter runs/a --prompts in.jsonl --out out.jsonl
    """
    if bool(prompt) == (prompts is not None):
        _fail("give either --prompt TEXT or --prompts FILE.jsonl")
    from minitlt.serve import load_served, read_prompts, run_generate
    from minitlt.spec import SamplingParams

    if prompt.encode(errors="replace").decode() != prompt:
        _fail("--prompt holds bytes that are not UTF-8")
    rows = [prompt] if prompts is None else read_prompts(prompts)
    values = (max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens)
    SamplingParams(*values)  # what is wrong with them is said before the model is loaded
    ways = arms.split(",") if arms else []
    served = load_served(model, drafter, arms=ways, dtype=dtype, max_rows=max_rows)
    params = SamplingParams(*values, stop_ids=served.stop_ids)
    try:
        run_generate(served, rows, params, out, seed=seed, raw=raw, live=prompts is None)
    except KeyboardInterrupt:
        more = f"; the same command goes on with {out}" if out else ""
        print(f"\nstopped{more}", file=sys.stderr)
        raise


@app.command(context_settings=_PASS_ON)
def warmup(
    context: typer.Context,
    config: Config = None,
    out: Annotated[Path, typer.Option(help="Folder for the drafter.")] = Path("drafter"),
    seconds: Annotated[float, typer.Option(help="How long.")] = 300.0,
    steps: Annotated[int, typer.Option(help="Train steps at most; 0 = no limit.")] = 0,
) -> None:
    """Train a drafter before RL.

    minitlt warmup [RECIPE] [--any_field VALUE ..]: model, prompts, sampling and drafter are the
    recipe's. Saved after every round; Ctrl-C ends it.

    Examples:

        minitlt warmup 01_smollm2_cpu --seconds 300 --out drafters/mine

        minitlt train 01_smollm2_cpu --drafter.start drafters/mine
    """
    if seconds <= 0 or steps < 0:
        _fail(f"--seconds must be positive and --steps not negative, not {seconds:g} and {steps}")
    _, settings = _settings(context, config)
    from minitlt.run import prepare
    from minitlt.warmup import run_warmup

    try:
        run_warmup(prepare(settings, out), out, seconds, steps)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if not (out / "drafter.safetensors").is_file():
        _fail("ended before the first round was done; nothing was saved", 130)
    print(f"start from it: minitlt train .. --drafter.start {out}")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Run folder, or a drafter's folder or Hub id.")],
    dest: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        str, typer.Option(help="sglang, vllm, specforge, speculators or native.")
    ] = "sglang",
    model: Annotated[str, typer.Option(help="Its target; default: the run's policy.")] = "",
    read_as: Annotated[str, typer.Option(help="sglang or vllm, for a foreign head.")] = "",
    check: Annotated[bool, typer.Option(help="Load it back and compare 3 steps.")] = False,
) -> None:
    """Write a drafter for another engine.

    Says how to serve it there, and with --check that it is the same.

    Examples:

        minitlt export runs/a out/sglang --to sglang --check

        minitlt export drafters/smollm2 out/vllm --to vllm --model smollm2-135m
    """
    from minitlt.serve import export as write

    print("\n".join(write(run, dest, to, model=model, read_as=read_as, check=check)))


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="A run folder.")],
    run_b: Annotated[Path, typer.Argument(help="Another.")],
    assert_equal: Annotated[bool, typer.Option(help="Exit code 1 unless equal.")] = False,
) -> None:
    """Compare two runs.

    Numbers side by side, and whether they did the same thing: completions, rewards, losses and
    every bit of the final policy.

    Example:

        minitlt compare runs/plain runs/speculative --assert-equal
    """
    from minitlt.compare import differences, table

    with _logs_of(run_a, run_b):
        print("\n".join(table(run_a, run_b)))
        found = differences(run_a, run_b)
    print("\n".join(found) if found else "equal: completions, rewards, losses, final policy")
    if found and assert_equal:
        raise typer.Exit(1)


@app.command()
def simulate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    ranks: Annotated[int, typer.Option(help="Ranks per node; 0 = as the run had.")] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
) -> None:
    """Replay a run on other numbers of ranks.

    From its lengths and step costs, with and without drafts and harvesting.

    Example:

        minitlt simulate runs/a --ranks 8 --nodes 4
    """
    from minitlt.report import read_events
    from minitlt.simulate import simulate as replay

    if ranks < 0 or nodes < 1:
        _fail(f"--ranks cannot be negative and --nodes must be positive, not {ranks} and {nodes}")
    with _logs_of(run):
        print("\n".join(replay(read_events(run / "events.jsonl"), ranks, nodes)))


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks.

    And how to get it; exit code 1 if something needed is missing.

    Example:

        minitlt doctor
    """
    from minitlt.doctor import report as examine

    if not examine():
        raise typer.Exit(1)


@app.command(context_settings=_PASS_ON | {"help_option_names": []})
def bench(context: typer.Context) -> None:
    """Run a benchmark of the repository.

    minitlt bench rollout|step|kernels|drafter|match_rate|model [OPTIONS ..]

    Examples:

        minitlt bench kernels --help

        minitlt bench step --steps 4 --drafter smollm2
    """
    import subprocess

    folder = Path(__file__).parent.parent / "benchmarks"
    name, *rest = context.args or ["--help"]
    if name == "--help":
        print(context.command.help)
        return
    scripts = {p.stem: p for p in folder.glob("[a-z]*.py") if not p.stem.endswith("_peer")}
    if not scripts:
        _fail("the benchmarks come with the repository: clone it and run this there")
    if name not in scripts:
        _fail(f"no benchmark {name!r}; there are {', '.join(sorted(scripts))}")
    command = [sys.executable, str(scripts[name]), *rest]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _mend_streams() -> None:
    """Streams that are closed lead nowhere, and a terminal without umlauts shows a ? for one."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # or the next file would be such a stream
        continue
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """The installed command: usage errors are one line too."""
    _mend_streams()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:  # of the flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
        code = 0 if isinstance(error, BrokenPipeError) else 2  # | head
        if code:
            print(f"minitlt: cannot write the output: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, typer.Abort):  # before a command could make anything of it
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own errors have it
            raise
        text = error.format_message()  # without any word it is the help
        given = len(sys.argv) > 1
        print(f"minitlt: {' '.join(text.split())}" if given else text, file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
