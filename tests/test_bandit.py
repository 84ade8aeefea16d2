"""The bandit: which arm it settles on, what it tries and what it does not try again."""

import json

import pytest

from minitlt.bandit import Arm, Bandit


@pytest.mark.parametrize("new_rollouts", [True, False])
def test_what_a_hard_text_said_of_an_arm_fades_with_the_next_rollouts(new_rollouts):
    """One row, seconds and accept lengths as of SmolLM2: four row-steps of a hard text are all that
    is known of the better arm."""
    good, usual = Arm("eagle", 3, 2, 7), Arm("eagle", 1)
    bandit = Bandit([Arm(), usual, good])
    for arm, seconds in ((Arm(), 0.036), (usual, 0.040), (good, 0.053)):
        for _ in range(4):
            bandit.record(1, arm, 1, seconds)
    tokens = {Arm(): [1], usual: [1, 2], good: [3, 3, 2]}
    for step in range(300):
        if new_rollouts and step % 15 == 0:
            bandit.begin()
        arm = bandit.choose(1)
        bandit.record(
            1, arm, tokens[arm][step % len(tokens[arm])], {1: 0.040, 3: 0.053}.get(arm.depth, 0.036)
        )
    assert (bandit.choose(1) == good) == new_rollouts


def play(bandit, active, num, accept, seconds):
    """Picks of `num` steps where arms have these tokens per row and these seconds per step."""
    picks = []
    for _ in range(num):
        arm = bandit.choose(active)
        picks.append(arm.name)
        tokens = round(accept[arm.name] * active)
        bandit.record(active, arm, tokens, seconds(arm, active))
    return picks


ARMS = [Arm.parse(t) for t in ("off", "ngram-2", "eagle-4")]
ACCEPT = {"off": 1, "ngram-2": 2, "eagle-4": 3}


def step_seconds(arm, active):
    """One row: almost flat in depth. Many rows: cost in proportion to the tokens fed."""
    return 0.05 + 0.002 * active * (1 + 5 * arm.depth)


def test_bandit_settles_on_the_fastest_arm_per_bucket_and_resumes():
    bandit = Bandit(ARMS, epsilon=0.05, seed=3)
    alone = play(bandit, 1, 200, ACCEPT, step_seconds)
    assert alone.count("eagle-4") > 170 and set(alone) == {a.name for a in ARMS}
    crowd = play(bandit, 64, 200, ACCEPT, step_seconds)
    assert crowd.count("off") > 170
    other = Bandit(ARMS, epsilon=0.05, seed=99)
    play(other, 64, 20, ACCEPT, lambda arm, active: 1.0)  # of which nothing must stay
    other.load_state_dict(json.loads(json.dumps(bandit.state_dict())))
    assert [bandit.choose(64) for _ in range(50)] == [other.choose(64) for _ in range(50)]
    earlier = bandit.state_dict()
    earlier["seconds"] = [[b, name, [s for s, _ in v]] for b, name, v in earlier["seconds"]]
    other.load_state_dict(earlier)  # of a version that kept no rows: measured anew
    assert other.seen(64, ARMS[0]) == bandit.seen(64, ARMS[0]) and other.choose(64) in ARMS
    bandit.renew("eagle")
    assert bandit.seen(1, ARMS[2]) == 0 and bandit.seen(1, ARMS[0]) > 1
    with pytest.raises(ValueError, match="at least one arm"):
        Bandit([])


def test_bandit_does_not_try_what_cannot_win():
    """With one token per row at any depth, drafts cost time and bring nothing: known after one
    bucket, so the others hardly explore."""
    useless = dict.fromkeys(ACCEPT, 1)
    bandit = Bandit(ARMS, epsilon=0.0)
    play(bandit, 1, 30, useless, step_seconds)
    for active in (2, 4, 8, 16):
        picks = play(bandit, active, 30, useless, step_seconds)
        assert picks.count("off") >= 24, (active, picks)


def test_bandit_sees_acceptance_below_one_half():
    """Alone, two tokens every other step beat one token every step: the mean tells, a median of
    tokens per second would not."""
    bandit = Bandit(ARMS[:1] + ARMS[2:], epsilon=0.0)
    picks = []
    for i in range(100):
        arm = bandit.choose(1)
        picks.append(arm.name)
        bandit.record(1, arm, 1 + (arm.source == "eagle" and i % 5 < 2), 0.05)
    assert picks.count("eagle-4") > 80


def test_bandit_is_not_deterred_by_an_unlucky_start():
    """No draft of an arm's first six stands, later ones do: chains of one row begin like that."""
    bandit, steps = Bandit(ARMS, epsilon=0.0), dict.fromkeys(ACCEPT, 0)
    picks = []
    for _ in range(120):
        arm = bandit.choose(1)
        picks.append(arm.name)
        steps[arm.name] += 1
        lucky = arm.source == "eagle" and steps[arm.name] > 6
        bandit.record(1, arm, 1 + lucky, 0.05 + 0.001 * arm.depth)
    assert picks[-60:].count("eagle-4") > 50


def test_bandit_does_not_take_one_drafters_cost_for_anothers():
    """Copied drafts cost nothing to make; that learned ones of the same size do says nothing of
    them. (Arms had ruled each other out like that, and the worst of all was left: off.)"""
    arms = [Arm.parse(t) for t in ("off", "ngram-3", "eagle-2", "eagle-2x2b3")]
    bandit = Bandit(arms, epsilon=0.0)
    for arm, tokens, seconds in zip(arms, (4, 5, 4, 6), (41, 42, 54, 51), strict=True):
        for i in range(4):
            bandit.record(1, arm, 1 + (i < tokens - 4), seconds / 1000)
    assert bandit.choose(1).name != "off"


def test_bandit_drafts_only_for_a_clear_gain():
    """Once it knows: hope is worth more than the margin until an arm has been tried often."""
    for gain, chosen in ((1.08, "off"), (1.15, "eagle-4")):
        bandit = Bandit([ARMS[0], Arm("eagle", 4)], epsilon=0.0)
        for arm, seconds in ((ARMS[0], 1.0), (Arm("eagle", 4), 2.0 / gain)):
            for _ in range(400):
                bandit.record(8, arm, 8 * (1 + (arm.source == "eagle")), seconds)
        assert bandit.choose(8).name == chosen


def test_bandit_tries_again_after_the_drafter_has_changed():
    useless = dict.fromkeys(ACCEPT, 1)
    bandit = Bandit(ARMS, epsilon=0.0, seed=1)
    play(bandit, 8, 30, useless, step_seconds)
    assert play(bandit, 1, 60, useless, step_seconds).count("eagle-4") <= 4
    bandit.renew("eagle")
    assert play(bandit, 1, 60, ACCEPT, step_seconds).count("eagle-4") > 50


def test_one_slow_start_does_not_switch_speculation_off():
    bandit = Bandit(ARMS, epsilon=0.0)

    def seconds(arm, active, first=[True]):  # noqa: B006 (the first call of all is the slow one)
        slow = arm.name == "ngram-2" and first and first.pop()
        return 0.5 if slow else 0.05

    play(bandit, 64, 30, ACCEPT, seconds)
    assert play(bandit, 64, 50, ACCEPT, seconds).count("eagle-4") > 40


def test_an_arm_is_not_judged_by_the_rows_it_was_measured_with():
    """The same bucket begins with 31 rows and ends with 17: what was measured at its beginning is
    no slower for that. Drafts bring 1.2 tokens here and cost half as much again."""
    off, draft = Arm(), Arm("eagle", 2)
    seconds = {off: lambda rows: 0.02 + 0.001 * rows, draft: lambda rows: 0.03 + 0.0015 * rows}
    bandit = Bandit([off, draft])
    for arm, rows in ((off, 31), (draft, 17)):
        for _ in range(12):
            bandit.record(rows, arm, rows if arm == off else rows * 6 // 5, seconds[arm](rows))
    assert bandit.choose(17) == off
    assert bandit.usual(17, "off") == pytest.approx(seconds[off](17), rel=0.1)
    for _ in range(12):  # known in the next bucket too: then by how much it grows
        bandit.record(62, off, 62, seconds[off](62))
    assert bandit.usual(17, "off") == pytest.approx(seconds[off](17), rel=0.1)


def test_what_stood_at_a_texts_beginning_is_soon_forgotten():
    """32 rows copy from their prompts for ten steps, and then never again."""
    bandit, picks = Bandit(ARMS[:2]), []
    for step in range(40):
        arm = bandit.choose(32)
        picks.append(arm.name)
        copied = arm.source == "ngram" and step < 10
        bandit.record(32, arm, 32 * (1 + 2 * copied), 0.05 * (1 + (arm.source == "ngram")))
    assert picks[4:10] == ["ngram-2"] * 6 and picks[14:] == ["off"] * 26, picks


def test_one_slow_step_in_the_next_bucket_does_not_change_what_this_one_costs():
    bandit, off = Bandit(ARMS), Arm()
    for rows in range(16, 32):
        bandit.record(rows, off, rows, 0.1)
    before = bandit.usual(16, "off")
    bandit.record(40, off, 40, 0.5)  # a first step
    for _ in range(4):
        bandit.record(32, off, 32, 0.15)  # so near that it says little of how cost grows
    assert before == bandit.usual(16, "off") == pytest.approx(0.1 * (16 / 23) ** 0.5, rel=0.02)


def seconds_of(arm, active):
    """A forward is flat up to 16 tokens; a level of the drafter takes a tenth of it."""
    return 0.02 + 0.001 * max(0, active * (1 + arm.nodes) - 16) + 0.002 * arm.depth


def test_a_tree_that_could_not_win_with_all_its_drafts_is_not_tried():
    """32 rows, where every node costs as a token does: a small tree says what 14 more nodes cost at
    least. Alone they are nearly free, and are tried. A new drafter does not change costs."""
    arms = [Arm.parse(t) for t in ("eagle-4x6b24", "eagle-1x2", "off")]
    accept = {"off": 1, "eagle-1x2": 1.5, "eagle-4x6b24": 5}
    bandit = Bandit(arms)
    for _ in range(2):
        assert "eagle-4x6b24" not in play(bandit, 32, 20, accept, seconds_of)
        bandit.renew("eagle")
    assert play(bandit, 1, 40, accept, seconds_of)[-20:] == ["eagle-4x6b24"] * 20
    for _ in range(2):  # what it costs with 16 rows is known: too much for any drafter
        bandit.record(16, arms[0], 16, seconds_of(arms[0], 16))
    bandit.renew("eagle")
    assert "eagle-4x6b24" not in play(bandit, 16, 20, accept, seconds_of)


@pytest.mark.parametrize("rows", [8, 32])
def test_a_wide_tree_is_not_ruled_out_by_what_a_deep_chain_costs(rows):
    """On a GPU nodes are nearly free and levels of the drafter are not: the tree, of as many levels
    as the chain and four times its nodes, is the best of all."""
    arms = [Arm.parse(t) for t in ("off", "eagle-2", "eagle-4", "eagle-4x4")]
    accept = {"off": 1, "eagle-2": 1.9, "eagle-4": 2.4, "eagle-4x4": 3.1}

    def seconds(arm, active):
        return 0.008 + 0.0025 * arm.depth + 0.00003 * arm.nodes * active / 8

    bandit, picks = Bandit(arms), []
    for _ in range(200):
        arm = bandit.choose(rows)
        picks.append(arm.name)
        bandit.record(rows, arm, accept[arm.name] * rows, seconds(arm, rows))
    assert picks[-100:] == ["eagle-4x4"] * 100


@pytest.mark.parametrize("text", ["eagle-4p30", "eagle-4x1p30", "eagle-4x2p00", "ngram-3x2p30"])
def test_likely_drafts_are_of_learned_trees(text):
    with pytest.raises(ValueError, match="pNN, from 01 to 99, is of learned trees"):
        Arm.parse(text)
    assert Arm.parse(Arm.parse("eagle-4x3b5p05").name) == Arm("eagle", 4, 3, 5, 5)


def test_what_cost_too_much_with_more_rows_is_not_tried_with_fewer():
    """8 rows: a chain of 5 at 0.1 s. With 4 it takes half of that at least, which its known accept
    length does not outweigh there; with 1 an eighth, which says nothing."""
    plain, deep = Arm(), Arm("int8", 5)
    bandit = Bandit([plain, deep])
    for rows, seconds in ((8, 0.020), (4, 0.018), (1, 0.017)):
        for _ in range(4):
            bandit.record(rows, plain, rows, seconds)
    for _ in range(4):
        bandit.record(8, deep, 16, 0.100)
    assert bandit.choose(4) == plain
    assert bandit.choose(1) == deep


def test_an_arm_whose_first_step_ended_with_its_text_does_not_rule_out_all_others():
    """Its one step took less time than its smaller sibling's line allows: nobody can win then."""
    plain, short, deep = Arm(), Arm("int8", 8), Arm("int8", 16)
    bandit = Bandit([plain, short, deep])
    for arm, tokens, seconds in ((plain, 1, 0.020), (short, 8, 0.062)):
        for _ in range(6):
            bandit.record(1, arm, tokens, seconds)
    for _ in range(6):
        bandit.record(2, deep, 24, 0.130)
    bandit.record(1, deep, 3, 0.038)
    assert bandit.choose(1) != plain
