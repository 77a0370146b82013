import math

import numpy as np
import pytest

from relax.data.seeds import sample_seed
from relax.simulation.lengths import LONGEST, LengthModel, ModelError
from relax.simulation.speed import SpeedModel

SEEDS = [sample_seed(7, 0, prompt, 0, 0) for prompt in range(20_000)]


def draws(text: str) -> np.ndarray:
    model = LengthModel.parse(text)
    return np.array([model.draw(seed) for seed in SEEDS])


def test_a_constant_length_is_that_length() -> None:
    assert set(draws("constant:17").tolist()) == {17}


def test_a_length_depends_on_the_seed_alone() -> None:
    one, two = LengthModel.parse("lognormal:200,1"), LengthModel.parse("lognormal:200,1")
    assert [one.draw(seed) for seed in SEEDS[:100]] == [two.draw(seed) for seed in reversed(SEEDS[:100])][::-1]
    assert len({one.draw(seed) for seed in SEEDS[:1000]}) > 100


def test_a_log_normal_length_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    lengths = draws("lognormal:1000,0.8")
    assert LengthModel.parse("lognormal:1000,0.8").mean == 1000
    assert np.mean(lengths) == pytest.approx(1000, rel=0.03)  # its standard error is 0.7 %
    assert np.std(np.log(lengths)) == pytest.approx(0.8, rel=0.03)
    assert np.mean(np.log(lengths)) == pytest.approx(math.log(1000) - 0.32, abs=0.03)


def test_a_pareto_length_has_its_least_value_and_its_tail() -> None:
    lengths = draws("pareto:100,1.5")
    assert LengthModel.parse("pareto:100,1.5").mean == pytest.approx(300)
    assert lengths.min() == 100
    assert np.mean(lengths > 400) == pytest.approx(1 / 8, rel=0.1)
    assert np.mean(lengths > 1600) == pytest.approx(1 / 64, rel=0.2)


def test_lengths_from_a_file_come_from_it_with_equal_chance(tmp_path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n\n5\n5\n100\n")
    lengths = draws(f"file:{path}")
    assert LengthModel.parse(f"file:{path}").mean == pytest.approx(113 / 4)
    assert [np.mean(lengths == n) for n in (3, 5, 100)] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    assert set(lengths.tolist()) == {3, 5, 100}


def test_a_sample_has_at_least_one_token() -> None:
    assert draws("lognormal:0.5,2").min() == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("normal:3,4", "is no length model"),
        ("100", "is no length model"),
        ("constant:", "0 numbers after the colon"),
        ("constant:0", "N is '0'"),
        ("constant:0.5", "at least one token"),
        ("constant:1.5", "a whole number of tokens"),
        ("pareto:0.5,2", "at least one token"),
        ("constant:inf", "N is 'inf'"),
        ("lognormal:100", "Write lognormal:MEAN,SIGMA"),
        ("lognormal:100,-1", "SIGMA is '-1'"),
        ("lognormal:100,x", "SIGMA is 'x'"),
        ("pareto:100,1", "no mean"),
        ("file:", "names no file"),
        ("file:/nowhere/lengths", "/nowhere/lengths cannot be read: No such file"),
    ],
)
def test_text_that_is_no_length_model_is_refused_with_the_fix(text: str, said: str) -> None:
    with pytest.raises(ModelError) as refused:
        LengthModel.parse(text)
    assert said in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize("digest", [0, 2**64 - 1])
@pytest.mark.parametrize("text", ["constant:3", "lognormal:10,2", "pareto:10,2"])
def test_the_ends_of_the_uniform_number_are_lengths_too(monkeypatch, text: str, digest: int) -> None:
    monkeypatch.setattr("relax.simulation.lengths.xxhash.xxh3_64_intdigest", lambda _: digest)
    assert 1 <= LengthModel.parse(text).draw(1) <= LONGEST


@pytest.mark.parametrize("content", ["12\nx\n", "12\n0\n", "12\n-3\n", "12\n1.5\n", ""])
def test_a_file_that_does_not_hold_lengths_is_refused_with_its_line(tmp_path, content: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(ModelError, match="line 2" if content else "has no lengths"):
        LengthModel.parse(f"file:{path}")


def test_replicas_take_the_speeds_in_order_and_begin_again() -> None:
    speed = SpeedModel.parse("1000, 500,250")
    assert [speed.of(replica) for replica in range(4)] == [1000, 500, 250, 1000]


@pytest.mark.parametrize("text", ["", "0", "-3", "fast", "10,,20", "inf", "nan"])
def test_text_that_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="is no speed"):
        SpeedModel.parse(text)
