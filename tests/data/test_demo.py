"""What the demo starts from: prompts, tokenizer, model and the warm start."""

import importlib
import random
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from relax.data import PromptTokenizer

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        modules: dict[str, ModuleType] = {
            name: importlib.import_module(name) for name in ("task", "model", "evaluate", "warm_start", "prepare")
        }
        # Scripts beside each other import each other by bare names, which belong to nobody else's imports.
        for name in modules:
            del sys.modules[name]
        yield SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def tokenizer(demo: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = tmp_path_factory.mktemp("demo")
    demo.model.build_tokenizer().save_pretrained(directory)
    return PromptTokenizer(directory)


def test_training_and_held_out_words_never_meet(demo: SimpleNamespace) -> None:
    train = {demo.task.word_of(entry) for entry in islice(demo.task.entries(1, held_out=False), 3000)}
    held_out = {demo.task.word_of(entry) for entry in islice(demo.task.entries(1, held_out=True), 300)}
    assert not train & held_out
    assert all(3 <= len(word) <= 5 for word in train | held_out)


def test_every_id_of_the_model_is_a_token_and_a_prompt_begins_with_one_bos(
    demo: SimpleNamespace, tokenizer: PromptTokenizer
) -> None:
    model = demo.model.build_model()
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    assert model.config.vocab_size == len(demo.model.VOCABULARY) == len(set(demo.model.VOCABULARY.values()))
    ids = tokenizer.encode("spice>", add_special_tokens=True)
    assert ids.tolist() == [demo.model.BOS, *(demo.model.VOCABULARY[c] for c in "spice>")]
    assert tokenizer.decode([*ids, demo.model.EOS]) == "spice>"


def test_teacher_finishes_one_word_in_four(demo: SimpleNamespace) -> None:
    rng = random.Random(0)
    entry = {"answer": "ecips", "metadata": {"word": "Spice"}}
    answers = [demo.warm_start.teach(entry, rng) for _ in range(4000)]
    finished = sum(len(answer) == 5 for answer in answers) / len(answers)
    assert finished == pytest.approx(0.25, abs=0.03)
    assert {len(answer) for answer in answers} == {4, 5}
    assert sum(answer in ("ecips", "ecip") for answer in answers) / len(answers) == pytest.approx(0.92, abs=0.02)


def test_only_answers_and_their_end_are_targets(demo: SimpleNamespace) -> None:
    ids, targets = demo.warm_start.collate([([1, 9], "ab"), ([1], "c")])
    a, b, c, end = (*(demo.model.VOCABULARY[x] for x in "abc"), demo.model.EOS)
    assert ids.tolist() == [[1, 9, a, b, end], [1, c, end, end, end]]
    assert targets.tolist() == [[-100, -100, a, b, end], [-100, c, end, -100, -100]]


def test_warm_start_depends_on_its_seed_alone(demo: SimpleNamespace, tokenizer: PromptTokenizer) -> None:
    def weights(seed: int):
        return demo.warm_start.warm_start(tokenizer, seed, steps=3).model.norm.weight.detach()

    assert weights(1).equal(weights(1))
    assert not weights(1).equal(weights(2))


def test_response_does_not_depend_on_its_neighbours_and_ends_before_eos(
    demo: SimpleNamespace, tokenizer: PromptTokenizer
) -> None:
    import torch

    torch.manual_seed(0)
    model = demo.model.build_model().eval()
    with torch.no_grad():  # a flat random model repeats one token; this one wanders and ends
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    prompts = [tokenizer.encode(f"{w}>", add_special_tokens=True).tolist() for w in ("abc", "hello", "xyz", "q", "end")]
    together = demo.evaluate.respond(model, prompts, 12)
    assert together == [demo.evaluate.respond(model, [prompt], 12)[0] for prompt in prompts]
    assert all(demo.model.EOS not in response and len(response) <= 12 for response in together)
    # The first token that follows is what the logits say.
    for prompt, response in zip(prompts, together, strict=True):
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        assert (response[0] if response else demo.model.EOS) == first


@pytest.mark.long
def test_prepared_assets_are_reproducible_and_reused(demo: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("task", "model", "evaluate", "warm_start"):
            patch.setitem(sys.modules, name, getattr(demo, name))
        first, second = (demo.prepare.prepare(1, tmp_path / name) for name in "ab")
    assert 0.1 <= first.accuracy <= 0.4
    for name in ("model/model.safetensors", "train.jsonl", "heldout.jsonl"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()
    stamp = (first.directory / "model" / "model.safetensors").stat().st_mtime_ns
    assert demo.prepare.prepare(1, tmp_path / "a") == first
    assert (first.directory / "model" / "model.safetensors").stat().st_mtime_ns == stamp
