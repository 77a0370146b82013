"""From a row to token ids: the one tokenize function of Relax.

The controller's stream, the length filter and the validation all call `tokenize`; the engines receive token ids and
never see text, so a prompt cannot be tokenized in two ways. The `tokenizers` library reads `tokenizer.json` directly:
importing transformers' tokenizers would pull torch into processes that hold no model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from relax.data.errors import DataError
from relax.data.sources import Row

_AGAIN = "Download it again, or write it with AutoTokenizer.from_pretrained(...).save_pretrained(...)."


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """`text` as it was tokenized (template applied) and its `token_ids` (int32)."""

    text: str
    token_ids: np.ndarray


class PromptTokenizer:
    """The tokenizer of a Hugging Face checkpoint directory: `tokenizer.json`, special tokens and chat template."""

    def __init__(self, checkpoint: str | Path) -> None:
        self.checkpoint = Path(checkpoint)
        path = self.checkpoint / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"checkpoint {self.checkpoint} has no tokenizer.json",
                "Write it once with AutoTokenizer.from_pretrained(...).save_pretrained(...).",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer: {error}", _AGAIN) from None
        # A checkpoint may carry its own padding or truncation; a prompt must be neither cut nor padded.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config_path = self.checkpoint / "tokenizer_config.json"
        config = _object(config_path) if config_path.is_file() else {}
        self._special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value
        }
        bos = self._special.get("bos_token")
        self.bos_id: int | None = self._tokenizer.token_to_id(bos) if bos else None
        self._add_bos = bool(config.get("add_bos_token"))
        self.chat_template = _chat_template(self.checkpoint, config)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """`messages` ({role, content}) through the chat template, up to where the assistant begins to answer."""
        if self.chat_template is None:
            raise DataError(
                f"checkpoint {self.checkpoint} has no chat template",
                "Drop --apply-chat-template, or add a chat_template.jinja to the checkpoint.",
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered = render_jinja_template(
            conversations=[messages], chat_template=self.chat_template, add_generation_prompt=True, **self._special
        )
        return rendered[0][0]

    def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        """Token ids (int32) of `text`. Never two BOS at the start, whoever asked for the second."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if self.bos_id is not None:
            if add_special_tokens and self._add_bos and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            if ids[:2] == [self.bos_id, self.bos_id]:
                del ids[0]
        return np.array(ids, dtype=np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of `token_ids` without special tokens: what verifiers see."""
        return self._tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}", _AGAIN) from None
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no object", _AGAIN)
    return value


def tokenize(tokenizer: PromptTokenizer, row: Row, *, input_key: str, apply_chat_template: bool) -> Tokenized:
    """The prompt of `row`, from `row[input_key]`: a text, or with `apply_chat_template` also a list of messages.

    A templated text is encoded without further special tokens, because the template writes its own. Raises `DataError`
    (without the place of the row, which the caller knows) when the field is missing, of another type, or has no tokens.
    """
    if input_key not in row:
        raise DataError(f"there is no field {input_key!r}, only {sorted(row)}", "Set --input-key.")
    content = row[input_key]
    if apply_chat_template:
        text = tokenizer.render(_messages(content, input_key))
    elif isinstance(content, str):
        text = content
    else:
        fix = "Messages need --apply-chat-template." if isinstance(content, list) else "Set --input-key."
        raise DataError(f"field {input_key!r} is a {type(content).__name__}, not a text", fix)
    ids = tokenizer.encode(text, add_special_tokens=not apply_chat_template)
    if len(ids) == 0:
        raise DataError(f"field {input_key!r} is {content!r}, which has no tokens", "A prompt needs at least one.")
    return Tokenized(text, ids)


def _messages(content: Any, input_key: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if (
        isinstance(content, list)
        and content
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in content)
    ):
        return content
    raise DataError(
        f"field {input_key!r} is {str(content)[:80]!r}, neither a text nor messages", "Give a list of {role, content}."
    )


def _chat_template(checkpoint: Path, config: dict[str, Any]) -> str | None:
    """The template in its own file (current format), or in the tokenizer's configuration (older ones)."""
    path = checkpoint / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
