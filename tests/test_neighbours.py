"""Two runs on one machine at once: each swaps and merges its own drafters only.

Both are `minitlt train` with two ranks and a tiny model. Run: pytest -n 0 -m slow
tests/test_neighbours.py
"""

import pytest
from test_faults import Run, _no_run_outlives_its_test, recipe  # noqa: F401 (fixtures)

from minitlt.events import read_events

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_two_runs_at_once_leave_each_other_alone(recipe, tmp_path):  # noqa: F811
    runs = []
    for seed in (1, 2):
        folder, spot = tmp_path / str(seed), {"publish_seconds": 0.05}
        config = recipe(seed=seed, spot=spot, drafter={"draft_vocab_size": 64, "seed": seed})
        runs.append(Run(folder, "--config", config, "--run-dir", folder))
    for run in runs:
        run.wait_for("rollout_start")
    assert len(runs[0].folders | runs[1].folders) == 2
    assert all(run.process.poll() is None for run in runs)  # both at once
    prints = []
    for run in runs:
        code, lines = run.end()
        assert code == 0, lines
        events = read_events(run.folder / "events.jsonl")
        guards = {e["name"] for e in events if e["event"] == "guard"}
        assert not guards & {"drafters_differ", "swap_file_skipped", "publish_failed"}
        merges = [e for e in events if e["event"] == "merge"]
        mine = [[e["fingerprint"] for e in merges if e["rank"] == rank] for rank in (0, 1)]
        assert mine[0] == mine[1] and len(mine[0]) == 4
        own = {e["version"] for e in events if e["event"] == "publish"}
        assert {e["version"] for e in events if e["event"] == "swap"} <= own
        assert sum(e["drafter_steps"] for e in events if e["event"] == "harvest_end") > 0
        prints.append(mine[0])
    assert not set(prints[0]) & set(prints[1])
