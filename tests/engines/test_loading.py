"""Loading: what is refused, and what stays in service after a refusal."""

import dataclasses

import models
import numpy as np
import pytest
from conftest import Rig, prompt, request

from relax.weights.errors import DigestMismatch, NameMismatch, NotStored, WeightError
from relax.weights.store import ChunkStore


def serves(rig: Rig, version: int) -> bool:
    (result,) = rig.generate(request("probe"))
    return result.runs == ((version, 24),) and rig.error(result, prompt()) < 1e-4


@pytest.fixture
def elsewhere(tmp_path) -> ChunkStore:
    return ChunkStore(tmp_path / "elsewhere", create=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[:-1], "missing: model.norm.weight"),
        (lambda tensors: [*tensors, ("lm_head.weight", tensors[0][1])], "unexpected: lm_head.weight"),
        (lambda tensors: [(tensors[0][0], tensors[0][1][:-1]), *tensors[1:]], "of another shape: model.embed_tokens"),
    ],
)
def test_set_of_another_model_is_refused_and_the_old_weights_stay(tied: Rig, elsewhere, change, message) -> None:
    tensors = change(models.published(tied.model))
    manifest = elsewhere.publish(tensors, run_id="r", lineage=3, version=900, step=0)
    with pytest.raises(NameMismatch, match=message):
        tied.run(tied.engine.load(manifest, elsewhere.directory, deadline=60))
    assert serves(tied, tied.version)


def test_set_with_a_changed_byte_is_refused_and_the_old_weights_stay(tied: Rig, elsewhere) -> None:
    tensors = [(name, tensor + 1) for name, tensor in models.published(tied.model)]
    manifest = elsewhere.publish(tensors, run_id="r", lineage=3, version=901, step=0)
    chunk = manifest.tensors[3].chunks[0]
    with (elsewhere.directory / "0.weights").open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\xff" * 4)
    with pytest.raises(DigestMismatch, match=manifest.tensors[3].name):
        tied.run(tied.engine.load(manifest, elsewhere.directory, deadline=60))
    assert serves(tied, tied.version)


def test_set_that_is_not_stored_is_refused_and_the_old_weights_stay(tied: Rig, elsewhere) -> None:
    tensors = [(name, tensor + 1) for name, tensor in models.published(tied.model)]
    manifest = elsewhere.publish(tensors, run_id="r", lineage=3, version=902, step=0)
    elsewhere.remove()
    with pytest.raises(NotStored, match="no weight store"):
        tied.run(tied.engine.load(manifest, elsewhere.directory, deadline=60))
    ChunkStore(elsewhere.directory, create=True)
    with pytest.raises(WeightError, match="which holds nothing"):
        tied.run(tied.engine.load(manifest, elsewhere.directory, deadline=60))
    assert serves(tied, tied.version)


def test_same_version_may_be_loaded_twice(tied: Rig) -> None:
    manifest = tied.publish(61)
    for _ in range(2):
        tied.load(manifest)
        assert serves(tied, tied.version)


def test_unchanged_weights_under_a_new_tag_are_served_as_the_new_version(tied: Rig) -> None:
    (before,) = tied.generate(request("before"))
    again = tied.store.retag(lineage=3, version=tied.version + 1, step=0)
    tied.version += 1
    tied.load(again)
    assert serves(tied, tied.version)
    assert np.array_equal(tied.generate(request("after"))[0].token_ids, before.token_ids)


def test_engine_info_names_what_is_served(untied: Rig) -> None:
    info = untied.engine.info
    assert info.tag is not None
    assert info.tag.order == (3, untied.version)
    assert (info.engine, info.dtype, info.max_model_len, info.max_num_seqs) == ("vllm", "float32", 256, 16)
    assert info.eos_token_ids == (models.EOS, models.OTHER_EOS)
    assert len(info.pids) == 1
    assert dataclasses.is_dataclass(info)
