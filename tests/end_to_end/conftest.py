"""Runs that several tests look at are made once; and hosts for those that need several."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
import torch
from namespaces import Host, NoNamespaces, two_hosts
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def lockstep(tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Run:
    """Twenty batches in lockstep, two optimizer steps each: a tied model, temperature 0.7."""
    folder = tmp_path_factory.mktemp("lockstep")
    return tiny_run.launch(folder, num_rollout=20, num_steps_per_rollout=2, rollout_temperature=0.7)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Run:
    """Six batches in lockstep: an untied model, temperature 1."""
    folder = tmp_path_factory.mktemp("untied")
    return tiny_run.launch(folder, hf_checkpoint=str(untie(folder / "model")))


@pytest.fixture(scope="session")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Run:
    """Twelve batches with staleness up to 2, two rollout replicas, two ranks of the actor."""
    return tiny_run.launch(
        tmp_path_factory.mktemp("asynchronous"),
        services={"rollout": {"replicas": 2}, "actor": {"ranks": 2, "tensor_parallel_size": 2}},
        max_staleness=2,
        use_tis=True,
        num_rollout=12,
        rollout_temperature=0.7,
    )


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as pair:
            yield pair
    except NoNamespaces as reason:
        pytest.skip(f"this machine gives us no namespaces: {reason}")


def untie(directory: Path) -> Path:
    """The tiny model with an output layer of its own, far from the embedding."""
    model = AutoModelForCausalLM.from_pretrained(tiny_run.TINY, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(3)
    copy.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
    copy.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_run.TINY).save_pretrained(directory)
    return directory
