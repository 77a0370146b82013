from pathlib import Path

import pytest

from relax.data import DataError, PromptTokenizer, tokenize

from .conftest import write_tokenizer

BOS = 1


def ids(tokenizer: PromptTokenizer, row: dict, template: bool = False) -> list[int]:
    return tokenize(tokenizer, row, input_key="prompt", apply_chat_template=template).token_ids.tolist()


@pytest.mark.parametrize("prompt", ["abc>", "<bos>abc>"])
def test_plain_text_begins_with_exactly_one_bos(checkpoint: Path, prompt: str) -> None:
    tokenizer = PromptTokenizer(checkpoint)
    got = ids(tokenizer, {"prompt": prompt})
    assert got[0] == BOS and BOS not in got[1:]
    assert len(got) == 5
    assert tokenizer.decode(got) == "abc>"


def test_bos_asked_for_by_the_configuration_alone_is_added_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, add_bos=False)
    assert ids(PromptTokenizer(tmp_path), {"prompt": "ab"})[0] != BOS
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"add_bos_token": true, ', 1))
    assert ids(PromptTokenizer(tmp_path), {"prompt": "ab"}).count(BOS) == 1


def test_template_writes_its_own_bos_and_a_text_is_one_user_message(checkpoint: Path) -> None:
    tokenizer = PromptTokenizer(checkpoint)
    messages = [{"role": "user", "content": "hi"}]
    tokenized = tokenize(tokenizer, {"prompt": messages}, input_key="prompt", apply_chat_template=True)
    assert tokenized.text == "<bos>[user]hi[a]"
    assert tokenized.token_ids.tolist().count(BOS) == 1
    assert tokenized.token_ids.tolist() == ids(tokenizer, {"prompt": "hi"}, template=True)


def test_ids_equal_those_of_transformers(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(checkpoint)), PromptTokenizer(checkpoint)
    for text in ("spice>", "a b", "é?", ""):
        assert ours.encode(text, add_special_tokens=True).tolist() == theirs(text).input_ids
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "12+7="}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids(ours, {"prompt": messages}, template=True) == expected
    generated = [1, 8, 9, 2, 0]
    assert ours.decode(generated) == theirs.decode(generated, skip_special_tokens=True)


def test_padding_and_truncation_of_the_checkpoint_are_not_applied(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(ids(PromptTokenizer(tmp_path), {"prompt": "abcdefgh"})) == 9


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"question": "x"}, False, r"no field 'prompt', only \['question'\]"),
        ({"prompt": 7}, False, "is a int, not a text"),
        ({"prompt": [{"role": "user", "content": "x"}]}, False, "--apply-chat-template"),
        ({"prompt": [{"role": "user"}]}, True, "neither a text nor messages"),
        ({"prompt": []}, True, "neither a text nor messages"),
    ],
)
def test_unusable_prompts_are_refused(checkpoint: Path, row: dict, template: bool, says: str) -> None:
    with pytest.raises(DataError, match=says):
        ids(PromptTokenizer(checkpoint), row, template)


def test_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokens"):
        ids(PromptTokenizer(write_tokenizer(tmp_path, add_bos=False)), {"prompt": ""})


def test_checkpoint_without_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        PromptTokenizer(tmp_path)
    with pytest.raises(DataError, match="no chat template"):
        ids(PromptTokenizer(write_tokenizer(tmp_path, template=None)), {"prompt": "x"}, template=True)
