"""Rewards that teach nothing are told of, once, and others are not."""

from trainer_env.training.flat_rewards import PATIENCE, FlatRewards


def steps(flat, count, share=1.0):
    """What is said of so many steps."""
    said = [flat.step({"frac_reward_zero_std": share}, -0.01) for _ in range(count)]
    return [text for text in said if text]


def test_ten_steps_in_a_row_are_told_of_in_one_line_and_once():
    flat = FlatRewards()
    assert steps(flat, PATIENCE - 1) == []
    (line,) = steps(flat, 3 * PATIENCE)
    assert "\n" not in line
    assert line.startswith(f"{PATIENCE} steps in a row taught nothing")
    assert "(mean now -0.01)" in line
    assert "data.chat" in line


def test_one_group_that_differs_is_something_to_learn_from():
    flat = FlatRewards()
    for _ in range(3):
        assert steps(flat, PATIENCE - 1) == []
        assert steps(flat, 1, share=0.99) == []


def test_a_step_that_reuses_a_batch_counts_as_the_batch_did():
    flat = FlatRewards()
    assert steps(flat, 1) == []
    *earlier, last = [flat.step({}, None) for _ in range(PATIENCE - 1)]
    assert last
    assert not any(earlier)


def test_figures_that_were_never_there_mean_nothing():
    flat = FlatRewards()
    assert not any(flat.step({}, 0.5) for _ in range(PATIENCE))
