"""What counts as a stall."""

from relax.services.watchdog import Watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def looked(dog: Watchdog, clock: Clock, seconds: int) -> str | None:
    """What it says within so many looks, one a second."""
    for _ in range(seconds):
        clock.now += 1.0
        if (problem := dog.look()) is not None:
            return problem
    return None


def watchdog() -> tuple[Watchdog, Clock]:
    clock = Clock()
    return Watchdog(10.0, lambda problem: None, clock), clock


def test_without_work_nothing_stalls() -> None:
    dog, clock = watchdog()
    assert looked(dog, clock, 100) is None


def test_work_that_does_not_move_is_a_stall() -> None:
    dog, clock = watchdog()
    looked(dog, clock, 100)
    with dog.work("scoring"):
        assert looked(dog, clock, 10) is None
        dog.moved("scoring")
        assert looked(dog, clock, 10) is None
        assert looked(dog, clock, 1) == "has not got on with scoring for --stall-timeout 10 s"
    assert looked(dog, clock, 100) is None


def test_one_kind_of_work_says_nothing_of_another() -> None:
    dog, clock = watchdog()
    with dog.under_way("sampling"):
        for _ in range(5):
            assert looked(dog, clock, 2) is None
            with dog.work("loading weights"):
                pass
        assert looked(dog, clock, 1) == "has not got on with sampling for --stall-timeout 10 s"


def test_work_that_is_given_up_and_begun_again_has_not_moved() -> None:
    """As of a replica whose samples never end, and are dropped one after the other."""
    dog, clock = watchdog()
    for _ in range(5):
        with dog.under_way("sampling"):
            assert looked(dog, clock, 2) is None
        assert looked(dog, clock, 100) is None, "there is no work meanwhile"
    with dog.under_way("sampling"):
        assert looked(dog, clock, 1) == "has not got on with sampling for --stall-timeout 10 s"
    dog.moved("sampling")
    assert looked(dog, clock, 100) is None


def test_a_loop_that_does_not_run_is_a_stall_with_or_without_work() -> None:
    dog, clock = watchdog()
    dog.loop_runs()
    assert looked(dog, clock, 10) is None
    assert looked(dog, clock, 1) == "has not looked at a message for --stall-timeout 10 s"


def test_a_process_that_was_stopped_has_lost_no_time() -> None:
    dog, clock = watchdog()
    dog.loop_runs()
    with dog.work("scoring"):
        looked(dog, clock, 5)
        clock.now += 1000.0
        assert looked(dog, clock, 4) is None
        assert looked(dog, clock, 10) is not None
