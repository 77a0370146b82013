"""Names from elsewhere become no path of their sender's choice."""

from pathlib import Path
from typing import Any

import pytest

from relax.launch.places import places_of
from relax.launch.rundir import RunDir
from relax.names import file_name
from relax.protocol.codec import decode, encode
from relax.protocol.errors import Refused
from relax.protocol.messages import Member, Welcome

BAD = ["", ".", "..", "../x", "/etc/passwd", "a/b", ".hidden", "-x", "a\x00b", "a\n", "a b", "ü", "x" * 200]


@pytest.mark.parametrize("text", BAD)
def test_what_can_be_no_file_name_is_refused_wherever_it_would_become_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be no file name"):
        file_name(text, "it")
    run = RunDir(tmp_path, "r", tmp_path, tmp_path)
    if text not in ("", ".", "..", "-x", ".hidden"):  # with a prefix or suffix these are harmless
        with pytest.raises(ValueError, match="can be no file name"):
            places_of(text)
        with pytest.raises(ValueError, match="can be no file name"):
            run.log(text)
        with pytest.raises(ValueError, match="can be no file name"):
            run.out(text)
    with pytest.raises(ValueError, match="can be no file name"):
        run.endpoint(text)


def test_names_that_services_have_pass(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "r", tmp_path, tmp_path)
    assert run.log("rollout-0").parent == run.out("actor.rank1").parent == tmp_path / "logs"
    assert places_of("a1b2c3d4e5f6")[1] == Path("/dev/shm/relax-a1b2c3d4e5f6")


@pytest.mark.parametrize("text", BAD)
def test_messages_with_such_names_are_refused(text: str) -> None:
    def forged(message: Any, **changes: Any) -> list[Any]:
        values = {name: getattr(message, name) for name in type(message).__slots__} | changes
        fake = object.__new__(type(message))
        for name, value in values.items():
            object.__setattr__(fake, name, value)
        return encode(fake)

    member = Member("rollout-0", "rollout", "ipc:///x", "1")
    for message, field in ((Welcome("r", 0, 0), "run_id"), (member, "name"), (member, "role"), (member, "incarnation")):
        with pytest.raises(Refused, match="can be no file name"):
            decode(forged(message, **{field: text}))
    with pytest.raises(Refused, match="endpoint"):
        decode(forged(member, endpoint="file:///etc/passwd"))
    assert decode(forged(member)) == member
