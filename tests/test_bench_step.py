"""benchmarks/step.py: the split of a step, the assertion of equal rollouts, the honest summary.

How to run: python -m pytest tests/test_bench_step.py (-m slow for the whole on a tiny model)
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml
from tiny import save_tiny_model

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # for _machine.py beside it
spec = importlib.util.spec_from_file_location("bench_step", BENCHMARKS / "step.py")
assert spec and spec.loader
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)


def rank(**changes):
    base = {"generate_s": 5.0, "window_s": 0.2, "reward_s": 0.1, "step_s": 9.0, "tokens": 10}
    return base | {"digest": "a"} | changes


def test_the_split_follows_the_slowest_rank():
    """Rank 0 generates for 2 s and trains until 5.5 s, rank 1 generates for 5 s: 0.5 s is added."""
    done = step.combine((rank(generate_s=2.0, window_s=3.5), rank()))
    assert (done["rollout_s"], done["harvest_s"]) == (5.0, 0.5)
    assert done["update_s"] == pytest.approx(9.0 - 5.0 - 0.5 - 0.1)
    assert done["idle_s"] == 3.0 and done["tokens"] == 20 and done["digests"] == ["a", "a"]


def result(step_s, rate, digests=(("x",),)):
    parts = {"step_s": step_s, "rollout_s": 4.0, "harvest_s": 0.1, "reward_s": 0.1, "update_s": 3.0}
    return {"median": parts, "rollout_tok_s": rate, "digests": list(digests)}


def test_the_summary_names_what_does_not_help():
    said = step.conclude({"plain": result(10.0, 50.0), "tlt": result(10.1, 75.0)})
    assert said["tlt_over"]["plain"] == {"rollout_rate": 1.5, "step": pytest.approx(10 / 10.1)}
    assert said["does_not_help"] == [
        "rollout is only 40% of a step; the rest is not touched",
        "step over plain: 0.99 x",
    ]
    assert step.conclude({"plain": result(5.0, 50.0), "tlt": result(4.0, 75.0)})[
        "does_not_help"
    ] == []  # fmt: skip


def test_other_completions_are_an_error(tmp_path, monkeypatch, capsys):
    drawn = {"plain": result(1.0, 1.0), "tlt": result(1.0, 1.0, [("y",)])}
    monkeypatch.setattr(step, "run_arm", lambda arm, *rest: drawn[arm])
    out = tmp_path / "out.jsonl"
    assert step.main(["--arms", "plain", "tlt", "--out", str(out)]) == 1
    assert "different completions" in capsys.readouterr().err and not out.exists()
    drawn["tlt"] = drawn["plain"]
    assert step.main(["--arms", "plain", "tlt", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["arm"] for line in lines] == ["plain", "tlt"]
    assert all(line["versions"]["trl"] and line["machine"]["cores"] for line in lines)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_all_arms_on_a_tiny_model(tmp_path, capfd):
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model_name_or_path": str(tmp_path / "model"),
        "task": {"name": str(tmp_path / "data.jsonl")},
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 16,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    out = tmp_path / "out.jsonl"
    recipe = str(tmp_path / "tiny.yaml")
    assert step.main([recipe, "--steps", "2", "--nproc", "2", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["arm"] for line in lines] == list(step.ARMS)
    for line in lines:
        parts = [line["median"][name] for name in step.PARTS]
        assert line["seed"] == 3 and line["nproc"] == 2 and all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(line["median"]["step_s"])
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["identical_rollouts"] is True and said["tlt_over"].keys() == {
        "plain",
        "trl",
        "trl_cb",
    }


def test_an_arm_of_others_that_fails_takes_no_figures_of_ours_with_it(
    tmp_path, monkeypatch, capsys
):
    from minitlt.launch import RunFailed

    def run(arm, *rest):
        if arm == broken:
            raise RunFailed("rank 0 was ended by SIGABRT")
        return result(1.0, 1.0)

    monkeypatch.setattr(step, "run_arm", run)
    out, broken = tmp_path / "out.jsonl", "trl_cb"
    assert step.main(["--out", str(out)]) == 0
    arms = [json.loads(line)["arm"] for line in out.read_text().splitlines()]
    assert arms == ["plain", "tlt", "trl"]
    assert "trl_cb is left out: rank 0 was ended by SIGABRT" in capsys.readouterr().err
    for broken in ("tlt", "trl_cb"):
        with pytest.raises(RunFailed):
            step.main(["--arms", broken, "--out", str(out)])
