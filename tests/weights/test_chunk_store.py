"""The node's store: content-addressed, at most two versions, refuses what is not whole."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.errors import (
    DigestMismatch,
    NameMismatch,
    NoRoom,
    NotStored,
    StoreBusy,
    Superseded,
    WeightError,
)
from relax.weights.manifest import MAX_CHUNK, Manifest
from relax.weights.publication import Publisher, manifest_path
from relax.weights.store import ChunkStore


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 5, generator=draw),
        "norm.weight": torch.randn(5, generator=draw).to(torch.bfloat16),
        "scale": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "big.weight": torch.randint(0, 255, (MAX_CHUNK + 1000,), generator=draw).to(torch.uint8),
    }


def publish(store: ChunkStore, version: int, values: dict, **more) -> Manifest:
    fields = {"run_id": "r", "lineage": 0, "version": version, "step": version, "wait": 0.2}
    return store.publish(values.items(), **(fields | more))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    made = ChunkStore(tmp_path / "weights", create=True)
    yield made
    made.remove()


def test_tensors_come_back_bit_equal_with_their_dtypes_and_shapes(store: ChunkStore) -> None:
    values = tensors()
    manifest = publish(store, 0, values)
    with ChunkStore(store.directory).open(manifest) as lease:
        read = {name: tensor.clone() for name, tensor in lease.items()}
    assert list(read) == list(values)
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value), name


def test_numpy_and_strided_tensors_are_stored_as_they_read(store: ChunkStore) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    manifest = publish(store, 0, {"a": base.T, "b": torch.from_numpy(base).T})
    with store.open(manifest) as lease:
        assert np.array_equal(lease.tensor("a").numpy(), base.T)
        assert np.array_equal(lease.tensor("b").numpy(), base.T)


def test_unchanged_tensors_keep_their_digests(store: ChunkStore) -> None:
    values = tensors()
    first = publish(store, 0, values)
    second = publish(store, 1, values | {"embed.weight": values["embed.weight"] + 1})
    same = [a.chunks == b.chunks for a, b in zip(first.tensors, second.tensors, strict=True)]
    assert same == [False, True, True, True, True]
    assert first.tag.digest != second.tag.digest
    assert publish(store, 2, values).tag.digest == first.tag.digest


def test_manifest_survives_its_file_and_contradictions_are_refused(store: ChunkStore, tmp_path: Path) -> None:
    manifest = publish(store, 3, tensors(), step=12)
    manifest.save(tmp_path / "0.3.json")
    assert Manifest.load(tmp_path / "0.3.json") == manifest
    assert max(c.size for c in manifest.chunks()) == MAX_CHUNK
    text = manifest.to_json().decode()
    for change in (
        ('"step":12', '"step":"12"'),
        ('"name":"scale"', '"name":"norm.weight"'),
        ('"shape":[7,5]', '"shape":[7,6]'),
        ('"dtype":"bfloat16"', '"dtype":"bf16"'),
        (manifest.tensors[0].chunks[0].digest, "0" * 32),
        (manifest.tensors[0].chunks[0].digest, "../../etc/passwd"),
        (f'"bytes":{manifest.tag.bytes}', '"bytes":1'),
        ('"lineage":0', '"lineage":0,"extra":1'),
    ):
        assert change[0] in text
        with pytest.raises(WeightError, match="peer-7"):
            Manifest.from_json(text.replace(*change), "peer-7")


def test_at_most_two_versions_are_kept_in_the_same_memory(store: ChunkStore) -> None:
    manifests = [publish(store, v, tensors(v)) for v in range(5)]
    assert [m.tag.version for m in store.manifests()] == [4, 3]
    assert [store.holds(m) for m in manifests] == [False, False, False, True, True]
    with pytest.raises(Superseded, match=r"0\.2"), store.open(manifests[2]):
        pass
    files = list(store.directory.glob("*.weights"))
    assert len(files) == 2
    assert {f.stat().st_size for f in files} == {manifests[0].image_bytes}


def test_second_place_is_reserved_with_the_first_version(store: ChunkStore) -> None:
    manifest = publish(store, 0, tensors())
    assert all(f.stat().st_blocks * 512 >= manifest.image_bytes for f in store.directory.glob("*.weights"))
    assert len(list(store.directory.glob("*.weights"))) == 2


def test_partial_or_foreign_set_is_refused_by_name_and_the_stored_one_stays(store: ChunkStore) -> None:
    values = tensors()
    manifest = publish(store, 0, values)
    wrong = {k: v for k, v in values.items() if k != "scale"} | {"stray": torch.ones(2), "norm.weight": torch.ones(6)}
    with pytest.raises(
        NameMismatch, match=r"missing: scale; unexpected: stray; .*norm.weight \(6,\) instead of \(5,\)"
    ):
        publish(store, 1, wrong)
    assert [m.tag.version for m in store.manifests()] == [0]
    expected = {t.name: t.shape for t in manifest.tensors}
    expected["lm_head.weight"] = (7, 5)
    with pytest.raises(NameMismatch, match=r"missing: lm_head\.weight"), store.open(manifest, expected=expected):
        pass


def test_changed_byte_is_refused_with_tensor_and_chunk_named(store: ChunkStore) -> None:
    manifest = publish(store, 0, tensors())
    last = manifest.tensors[-1].chunks[-1]
    with (store.directory / "0.weights").open("r+b") as file:
        file.seek(last.offset + last.size - 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DigestMismatch, match=r"big\.weight, chunk 1"), store.open(manifest):
        pass


def test_reader_keeps_its_version_and_the_waiting_writer_names_it(store: ChunkStore) -> None:
    manifests = [publish(store, v, tensors(v)) for v in range(2)]
    with store.open(manifests[0]) as lease:
        with pytest.raises(StoreBusy, match=rf"weights 0\.0 .*\[{os.getpid()}\]"):
            publish(store, 2, tensors(2))
        assert torch.equal(lease.tensor("scale"), tensors(0)["scale"])
    publish(store, 2, tensors(2))
    assert [m.tag.version for m in store.manifests()] == [2, 1]


def test_view_that_outlives_its_lease_is_an_error(store: ChunkStore) -> None:
    manifest = publish(store, 0, tensors())
    with pytest.raises(WeightError, match="still in use"), store.open(manifest) as lease:
        kept = lease.tensor("embed.weight")
    assert kept.shape == (7, 5)


def test_writing_to_a_view_does_not_reach_the_store(store: ChunkStore) -> None:
    manifest = publish(store, 0, tensors())
    with store.open(manifest) as lease:
        lease.tensor("embed.weight").zero_()
    with store.open(manifest) as lease:
        assert torch.equal(lease.tensor("embed.weight"), tensors()["embed.weight"])


def _die_while_writing(directory: Path) -> None:
    def values():
        yield "a", torch.ones(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    ChunkStore(directory).publish(values(), run_id="r", lineage=0, version=2, step=2)


def _die_while_reading(directory: Path, text: bytes) -> None:
    with ChunkStore(directory).open(Manifest.from_json(text, "test")):
        os.kill(os.getpid(), signal.SIGKILL)


def test_writer_that_dies_leaves_an_empty_place_and_no_lock(store: ChunkStore) -> None:
    for version in range(2):
        publish(store, version, {"a": torch.full((1000,), float(version))})
    child = multiprocessing.get_context("spawn").Process(target=_die_while_writing, args=(store.directory,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [m.tag.version for m in store.manifests()] == [1]
    publish(store, 2, {"a": torch.zeros(1000)})
    assert [m.tag.version for m in store.manifests()] == [2, 1]


def test_reader_that_dies_frees_its_lease(store: ChunkStore) -> None:
    manifests = [publish(store, v, tensors(v)) for v in range(2)]
    arguments = (store.directory, manifests[0].to_json())
    child = multiprocessing.get_context("spawn").Process(target=_die_while_reading, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    publish(store, 2, tensors(2))


def test_no_room_says_how_much_is_needed_and_leaves_the_newest(store: ChunkStore, monkeypatch) -> None:
    publish(store, 0, {"a": torch.ones(100)})
    publish(store, 1, {"a": torch.ones(100)})

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoRoom, match=r"two are kept, .* MiB are free.*shm-size"):
        publish(store, 2, {"a": torch.ones(100)})
    assert [m.tag.version for m in store.manifests()] == [1]


def test_reservation_beyond_the_free_space_allocates_nothing(store: ChunkStore, monkeypatch) -> None:
    stats = os.statvfs(store.directory)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("must not try what cannot fit"))
    with store.writer((0, 0), wait=1) as image, pytest.raises(NoRoom, match="two are kept"):
        image.reserve(stats.f_blocks * stats.f_frsize * 8)


def test_reservation_that_fails_half_way_gives_its_half_back(store: ChunkStore, monkeypatch) -> None:
    def fill_up(fd, offset, size):
        os.ftruncate(fd, size // 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with store.writer((0, 0), wait=1) as image, pytest.raises(NoRoom, match="two are kept"):
        image.reserve(10_000)
    assert (store.directory / "0.weights").stat().st_size == 0


def test_older_version_than_both_stored_is_refused(store: ChunkStore) -> None:
    publish(store, 5, tensors(5))
    publish(store, 6, tensors(6))
    with pytest.raises(Superseded, match="version 4"):
        publish(store, 4, tensors(4))
    publish(store, 2, tensors(2), lineage=1)
    assert [m.tag.order for m in store.manifests()] == [(1, 2), (0, 6)]


def test_publisher_leaves_manifests_and_repeats_unchanged_weights_by_tag_alone(store: ChunkStore, tmp_path) -> None:
    publisher = Publisher(store, run_id="r", lineage=2, manifests=tmp_path / "m")
    first = publisher.publish(0, 0, tensors().items())
    before = (store.directory / "0.weights").stat().st_mtime_ns
    again = publisher.publish(1, 4, None)
    assert (again.tag.version, again.tag.step, again.tensors) == (1, 4, first.tensors)
    assert again.tag.digest == first.tag.digest
    assert (store.directory / "0.weights").stat().st_mtime_ns == before
    assert store.newest() == again == Manifest.load(manifest_path(tmp_path / "m", 2, 1))
    with store.open(first), store.open(again):
        pass


def test_publisher_without_earlier_version_cannot_repeat_it(store: ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(NotStored, match="is empty"):
        Publisher(store, run_id="r", lineage=0, manifests=tmp_path).publish(0, 0, None)


def test_store_that_nobody_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotStored, match="no weight store"):
        ChunkStore(tmp_path / "gone")
    store = ChunkStore(tmp_path / "here", create=True)
    publish(store, 0, tensors())
    store.remove()
    assert not (tmp_path / "here").exists()


def test_checkpoint_shapes_leave_out_the_tied_head_and_refuse_a_directory_without_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(WeightError, match=r"no \.safetensors"):
        checkpoint_shapes(tmp_path)
    values = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert checkpoint_shapes(tmp_path) == dict.fromkeys(values, (4, 2))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert checkpoint_shapes(tmp_path) == {"model.embed_tokens.weight": (4, 2)}
