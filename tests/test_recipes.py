"""Every recipe and every command on the recipes' pages, checked without Hub and GPU."""

import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
import yaml
from tiny import save_tiny_model
from trl import GRPOConfig
from typer.testing import CliRunner

from minitlt.cli import app
from minitlt.config import RolloutConfig, recipe_paths
from minitlt.eagle3 import DrafterConfig
from minitlt.rewards import resolve_rewards
from minitlt.spot import SpotConfig

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes"
RECIPES = recipe_paths()
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model(folder, max_position_embeddings=4096)


def dry_run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments), "--dry-run"])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("smoke", [[], ["--smoke"]])
def test_a_recipe_passes_a_dry_run(name, smoke, model_dir):
    """The default model needs no Hub but a download, so the tiny one takes its place."""
    own = name.startswith(("01", "07"))
    local = ["--model_name_or_path", model_dir] if own else []
    done = dry_run(name, *smoke, *local)
    assert done.exit_code == 0, done.stderr
    resolved = yaml.safe_load(done.stdout)
    notes = re.findall(r"# (\S+): not checked: no Hub", done.stdout)
    if own:
        assert notes == []
    else:
        assert notes == [resolved["model_name_or_path"], resolved["task"]["name"]]
    ranks = re.search(r"# (\d+) ranks? x", done.stdout)
    assert ranks and int(ranks[1]) == resolved["nproc"]
    if smoke:
        assert resolved["max_steps"] == 2 and resolved["task"]["options"]["size"] == 8
        assert resolved["max_completion_length"] <= 32


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3", "mine.yaml"])
def test_an_accelerate_config_is_a_name_of_trls_or_a_path(name, tmp_path):
    if name.endswith("yaml"):
        name = str(tmp_path / name)
        Path(name).write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    done = dry_run("05", "--accelerate-config", name)
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["accelerate_config"] == name


def test_smoke_keeps_what_was_asked_for(model_dir):
    done = dry_run("02", "--smoke", "--max_steps", "5", "--model_name_or_path", model_dir)
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["max_steps"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["02", "--model_name_or_path", "no-owner"], "model 'no-owner' is neither"),
        (["02", "--task.options.rewards", "maths"], "did you mean 'math'"),
        (["02", "--task.options.questions", "q"], "has no option 'questions'"),
        (["02", "--drafter.start", "/no/such"], "no drafter at '/no/such'"),
        (
            ["02", "--accelerate-config", "fsdp3"],
            "accelerate_config: no file 'fsdp3'; did you",
        ),
        (["02", "--num_generations", "7"], "a group of num_generations 7 would be split"),
        (["99"], "no recipe '99'"),
    ],
)
def test_what_can_be_checked_without_the_hub_is(arguments, message):
    done = dry_run(*arguments)
    assert done.exit_code == 2, done.stdout
    assert message in done.stderr


def test_an_unreachable_hub_ends_a_real_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "02"])
    assert done.exit_code == 2 and "neither a folder with config.json nor on the Hub" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_task_rewards_exist(name):
    raw = yaml.safe_load(RECIPES[name].read_text())
    assert resolve_rewards(raw["task"].get("options", {}).get("rewards", ["math"]))


def test_a_plain_trl_file_runs_unchanged(model_dir, tmp_path, monkeypatch):
    """What `trl grpo` takes: its fields, env, num_processes, accelerate_config."""
    path = tmp_path / "grpo.yaml"
    values = {
        "model_name_or_path": str(model_dir),
        "dataset_name": "trl-lib/tldr",
        "reward_funcs": ["accuracy_reward"],
        "num_processes": 4,
        "accelerate_config": "zero2",
        "env": {"MINITLT_TEST_VARIABLE": 7},
        "per_device_train_batch_size": 8,
        "learning_rate": "1e-5",
        "torch_empty_cache_steps": 2,
    }
    path.write_text(yaml.safe_dump(values).replace("'1e-5'", "1e-5"))
    monkeypatch.setenv("MINITLT_TEST_VARIABLE", "6")
    done = dry_run("--config", path)
    assert os.environ["MINITLT_TEST_VARIABLE"] == "7"
    assert done.exit_code == 0, done.stderr
    assert "# 4 ranks x" in done.stdout and "# data set: not checked" in done.stdout
    again = tmp_path / "resolved.yaml"
    again.write_text(done.stdout)
    assert dry_run("--config", again).stdout == done.stdout


def test_smoke_of_a_plain_trl_file_adds_no_task(model_dir, tmp_path):
    path = tmp_path / "grpo.yaml"
    values = {"model_name_or_path": str(model_dir), "dataset_name": "trl-lib/tldr",
              "reward_funcs": ["think_format_reward"]}  # fmt: skip
    path.write_text(yaml.safe_dump(values))
    done = dry_run("--config", path, "--smoke")
    assert done.exit_code == 0, done.stderr
    assert "task" not in yaml.safe_load(done.stdout)


def test_the_lora_recipe_is_the_one_before_with_lora():
    whole, lora = (yaml.safe_load(RECIPES[name].read_text()) for name in list(RECIPES)[1:3])
    differ = {key for key in whole | lora if whole.get(key) != lora.get(key)}
    assert "use_peft" in differ
    assert {key for key in differ if not key.startswith("lora_")} == {"use_peft", "learning_rate"}


def test_the_table_lists_every_recipe_and_no_other():
    table = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(RECIPES)


def test_what_is_modelled_in_the_table_is_what_the_model_says(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model

    rows = {row.split("`")[1]: row for row in (FOLDER / "README.md").read_text().splitlines()
            if row.startswith("| `")}  # fmt: skip
    assert model.main([]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(said) == [name for name, row in rows.items() if "modelled" in row]
    for name, line in said.items():
        minutes, rest = re.fullmatch(r"(\d+) minutes; (.*)", line).groups()
        assert f"| {minutes}, modelled | modelled, not run: {rest}; " in rows[name]
        assert rows[name].endswith("| `--dry-run` only |")
    # Two rows of 1 and 3 steps, rates of 1 at full efficiency, nothing but bytes: 2 * 5 a
    # forward, and what is cached at the middle of each stretch, 1 byte a token.
    for constant, value in {"READ": 1.0, "MATH": 1.0, "HOST": 0.0, "DRAFT_HOST": 0.0}.items():
        monkeypatch.setattr(model, constant, value)
    tiny = model.Model(weights=5, layers=2, width=3, kv=1)
    plain, drafted = model.Machine(1.0, 1e9).rollout(tiny, [2, 4], accept=10.0)
    assert plain == (10 + 2 * 0.5) + 2 * (10 + 1 * 2)
    assert drafted == pytest.approx((plain + 3 * model.DRAFTS * 2 * 10 / 2) / 10)
    assert model.Machine(1.0, 1.0).update(tiny, 2, 3, 5) == 5 * 6 * (2 * 5 + 2 * 2 * 3 * 3)


def test_the_nodes_page_has_a_config_that_accelerate_reads(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    text = (FOLDER / "several_nodes.md").read_text()
    path = tmp_path / "two_nodes.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    config = load_config_from_file(str(path))
    recipe = yaml.safe_load(RECIPES["06_two_nodes_math_7b"].read_text())
    assert config.num_processes == recipe["nproc"] == 16
    assert config.fsdp_config["fsdp_version"] == 2


def commands():
    """Every `minitlt ..` line of the pages, with continuations joined."""
    for page in [*sorted(FOLDER.glob("*.md")), ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["minitlt"] and "NAME" not in words:
                name = " ".join([str(page.relative_to(ROOT)), *words[1:4]])
                yield pytest.param(words[1:], id=name)


def is_field(name):
    """Whether the command line takes it: a field of TRL's, or one of ours under its block."""
    block, dot, rest = name.partition(".")
    known = {"rollout": RolloutConfig, "drafter": DrafterConfig, "spot": SpotConfig}
    if dot:
        return rest in {field.name for field in fields(known[block])}
    return block in {"task", "nproc"} or block in {field.name for field in fields(GRPOConfig)}


@pytest.mark.parametrize("words", list(commands()))
def test_commands_on_the_pages_exist(words):
    group = typer.main.get_command(app)
    command = group.commands[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    if words[0] == "bench":
        known |= set(re.findall(r'"(--\w+)"', (ROOT / f"benchmarks/{words[1]}.py").read_text()))
    options = {word for word in words if word.startswith("--")}
    if not command.context_settings.get("ignore_unknown_options"):
        assert options <= known
    for word in words:
        if re.fullmatch(r"\d\d_\w+", word):
            assert word in RECIPES
    for option in options - known:
        assert is_field(option[2:]), option


def test_the_vllm_page_uses_options_that_trl_has(tmp_path):
    from trl.scripts.grpo import make_parser
    from trl.scripts.vllm_serve import ScriptArguments

    text = (FOLDER / "vllm_server.md").read_text()
    path = tmp_path / "grpo.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    words = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    words += ["--use_vllm", "true", "--vllm_mode", "server"]
    script, args, model, _ = make_parser().parse_args_and_config(words)  # unknown keys are errors
    assert script.dataset_name and script.reward_funcs == ["accuracy_reward"]
    assert args.max_completion_length == 16384 and args.learning_rate == 1e-6
    assert f"--model {model.model_name_or_path}" in text
    serve = re.search(r"trl vllm-serve (.*?)\n\n", text, re.DOTALL)[1]
    for option in re.findall(r"--(\w+)", serve):
        assert option in ScriptArguments.__dataclass_fields__, option
